import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqkv.cache import CacheSpec, cache_spec
from edgeqkv.errors import SpecError
from tests.variants import NON_CAUSAL, spec


@st.composite
def models(draw):
    heads = draw(st.sampled_from([1, 2, 4, 6, 16]))
    groups = draw(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0]))
    sharing = draw(st.sampled_from(["none", "k=v"] + (["q=k", "q=k=v"] if groups == heads else [])))
    return spec(
        num_attention_heads=heads,
        num_key_value_heads=groups,
        qkv_sharing=sharing,
        head_dim=draw(st.integers(1, 256)),
        num_hidden_layers=draw(st.integers(1, 100)),
        max_position_embeddings=draw(st.integers(1, 40_000)),
    )


@given(models(), st.sampled_from(["fp32", "fp16", "int8"]))
def test_shared_is_half_of_separate_and_heads_scale_linearly(model, dtype):
    separate = cache_spec(model, layout="separate", dtype=dtype)
    auto = cache_spec(model, dtype=dtype)
    assert separate.bytes_per_token == auto.bytes_per_token * (2 if model.key_is_value else 1)
    assert auto.nbytes == auto.bytes_per_token * auto.capacity
    assert len(auto.names()) == len(set(auto.names())) == auto.tensors_per_layer * auto.num_layers
    one_head = auto.bytes_per_token // model.num_key_value_heads
    assert one_head * model.num_key_value_heads == auto.bytes_per_token


@given(models(), st.integers(1, 2**40))
def test_context_that_fits_really_fits_and_one_more_does_not(model, budget):
    cache = cache_spec(model)
    tokens = cache.tokens_in(budget)
    assert tokens * cache.bytes_per_token <= budget < (tokens + 1) * cache.bytes_per_token


@given(models(), st.sampled_from(["fp32", "fp16", "int8"]))
def test_round_trip(model, dtype):
    cache = cache_spec(model, dtype=dtype)
    assert CacheSpec.from_dict(cache.to_dict()) == cache


def test_an_int8_row_carries_one_float32_scale():
    cache = cache_spec(spec(qkv_sharing="k=v", num_key_value_heads=2), dtype="int8")
    assert cache.bytes_per_token == 2 * 1 * 2 * (16 + 4)
    assert cache.scale_names() == ["cache.0.kv.scale", "cache.1.kv.scale"]
    assert cache_spec(spec()).scale_names() == []


def test_shared_is_refused_where_key_and_value_differ():
    with pytest.raises(SpecError, match="shared is impossible for GQA-2"):
        cache_spec(spec(num_key_value_heads=2), layout="shared")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity": 65}, "allowed: 1 to 64"),
        ({"capacity": 0}, "capacity is 0"),
        ({"layout": "both"}, "allowed: auto, shared, separate"),
        ({"dtype": "bf16"}, "allowed: fp32, fp16, int8"),
    ],
)
def test_bad_requests_are_refused(arguments, words):
    with pytest.raises(SpecError, match=words):
        cache_spec(spec(), **arguments)


def test_a_non_causal_model_has_no_cache():
    cache = cache_spec(NON_CAUSAL["(q=k-v)+"])
    assert (cache.layout, cache.bytes_per_token, cache.names()) == ("none", 0, [])
    assert cache.tokens_in(2**28) is None
