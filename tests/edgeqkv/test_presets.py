import pytest

from edgeqkv.cache import cache_spec
from edgeqkv.errors import UsageError
from edgeqkv.presets import PRESETS, preset

# SEEDS table of arXiv 2606.04032: parameters, cache bytes per token at 2 bytes an element.
PAPER_1 = {
    "300m-qkv": (305_534_976, 81_920),
    "300m-q-k=v": (284_542_976, 40_960),
    "300m-q=k-v": (284_542_976, 81_920),
    "300m-q=k=v": (263_550_976, 40_960),
    "300m-gqa-4": (274_046_976, 20_480),
    "300m-mqa": (266_174_976, 5_120),
    "300m-q-gqa-4": (268_798_976, 10_240),
    "300m-q-mqa": (264_862_976, 2_560),
    "1.2b-qkv": (1_215_102_976, 180_224),
    "1.2b-q-k=v": (1_122_783_232, 90_112),
    "1.2b-gqa-8": (1_076_623_360, 45_056),
    "1.2b-mqa": (1_036_233_472, 5_632),
    "1.2b-q-gqa-8": (1_053_543_424, 22_528),
    "1.2b-q-mqa": (1_033_348_480, 2_816),
}


@pytest.mark.parametrize("name", PAPER_1)
def test_parameters_and_bytes_per_token_of_the_paper(name):
    parameters, bytes_per_token = PAPER_1[name]
    assert preset(name).num_parameters() == parameters
    assert cache_spec(preset(name), dtype="fp16").bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    ("name", "parameters", "scale"),
    [
        ("124m-qkv", 124_373_760, 0.125),
        ("117m-q=i", 117_295_872, 0.0625),
        # The larger MLP (3456) spends exactly the parameters that W_Q = I saved.
        ("124m-q=i", 124_373_760, 0.0625),
    ],
)
def test_the_second_paper(name, parameters, scale):
    spec = preset(name)
    assert spec.num_parameters() == parameters
    assert spec.attention_scale == scale
    assert not spec.linear_bias
    assert not spec.layer_norm_bias
    assert spec.max_position_embeddings == 1024


def test_64_times_less_at_32k():
    """1.2B at 32,768 tokens: 5632 MiB of QKV cache become 88 MiB of Q-MQA."""
    for name, mib in (("1.2b-qkv", 5632), ("1.2b-q-mqa", 88)):
        assert cache_spec(preset(name), dtype="fp16").bytes_per_token * 32_768 == mib * 2**20


def test_names_and_labels():
    assert {n.split("-", 1)[0] for n in PRESETS} == {"300m", "1.2b", "124m", "117m"}
    assert len(PRESETS) == 19
    assert preset("300m-q-gqa-4").label == "Q-GQA-4"
    assert preset("1.2b-gqa-8").label == "GQA-8"
    assert preset("117m-q=i").label == "W_Q=I"
    with pytest.raises(UsageError, match="no preset '300m'; allowed: 300m-qkv"):
        preset("300m")


def test_spare_ids_are_never_sampled():
    assert all(s.used_tokens == 50_257 and s.vocab_size == 50_304 for s in PRESETS.values())
