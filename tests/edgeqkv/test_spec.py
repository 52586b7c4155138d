import pytest
import torch

from edgeqkv.errors import SpecError
from edgeqkv.model import Decoder
from edgeqkv.spec import ModelSpec
from tests.variants import VARIANTS, spec


@pytest.mark.parametrize("name", VARIANTS)
def test_decoder_has_exactly_the_declared_parameters(name):
    model = VARIANTS[name]
    with torch.device("meta"):
        decoder = Decoder(model)
    shapes = {k: tuple(v.shape) for k, v in decoder.state_dict().items()}
    assert shapes == model.parameter_shapes()
    assert sum(p.numel() for p in decoder.parameters()) == model.num_parameters()


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(name):
    assert ModelSpec.from_dict(VARIANTS[name].to_dict()) == VARIANTS[name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"qkv_sharing": "v=q"}, "allowed: none, q=k, k=v, q=k=v"),
        ({"qkv_sharing": "q=k", "num_key_value_heads": 1}, "as many key as query heads"),
        ({"qkv_sharing": "q=k", "query_mode": "identity"}, "contradicts"),
        ({"query_mode": "identity", "head_dim": 8}, "hidden_size"),
        ({"attention_scale": float("nan")}, "attention_scale"),
        ({"attention_scale": "1"}, "attention_scale"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"tie_word_embeddings": 1}, "true or false"),
        ({"score_position_features": 10}, "non-causal"),
        ({"num_used_tokens": 102}, "num_used_tokens is 102"),
    ],
)
def test_contradictions_are_refused(changes, words):
    with pytest.raises(SpecError, match=words):
        spec(**changes)


def test_unknown_and_missing_keys_are_refused():
    data = spec().to_dict()
    with pytest.raises(SpecError, match="unknown key 'rope_theta'"):
        ModelSpec.from_dict({**data, "rope_theta": 1})
    del data["vocab_size"]
    with pytest.raises(SpecError, match="lacks 'vocab_size'"):
        ModelSpec.from_dict(data)
