"""Integers, scales and what they mean."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgeqkv.errors import UnsupportedError
from edgeqkv.model_dir import load_model_dir, save_model_dir
from edgeqkv.quant import QuantRecipe, Rule, matrices, uniform
from export.quantise import (
    QuantTensor,
    apply_rounding,
    drop_floats,
    quantise,
    round_to_nearest,
    storable,
)
from tests.variants import VARIANTS, random_decoder, spec


def matrix(seed, rows=24, columns=64, size=1.0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size


@given(
    st.integers(0, 999), st.sampled_from([4, 8]), st.sampled_from([16, 32, 64]), st.floats(1e-3, 50)
)
def test_every_weight_is_within_half_a_step_or_clipped(seed, bits, group, size):
    weight = matrix(seed, size=size)
    t = round_to_nearest(weight, bits, group)
    most = 2 ** (bits - 1)
    assert (t.q.dtype, t.scale.dtype) == (torch.int8, torch.float16)
    assert t.scale.shape == (24, 64 // group)
    assert t.q.min() >= -most
    assert t.q.max() <= most - 1
    step = t.scale.float().repeat_interleave(group, 1)
    inside = (weight / step >= -most - 0.5) & (weight / step <= most - 0.5)
    assert ((t.dequantise() - weight).abs() <= step * 0.5001)[inside].all()
    assert inside.float().mean() > 0.9


@given(st.lists(st.floats(1e-7, 30000), min_size=1, max_size=20))
def test_float16_and_bfloat16_hold_a_stored_scale_exactly(values):
    scale = storable(torch.tensor(values))
    assert scale.dtype == torch.float16
    assert (scale > 0).all()
    assert scale.float().bfloat16().float().equal(scale.float())
    large = torch.tensor(values) > 1e-4
    torch.testing.assert_close(
        scale.float()[large], torch.tensor(values)[large], rtol=2**-8, atol=0
    )


@given(st.integers(0, 999))
def test_four_bit_scales_are_never_worse_than_the_one_that_clips_nothing(seed):
    weight = matrix(seed, rows=4) ** 3  # long tails
    groups = weight.view(4, 2, 32)
    scale = storable(groups.abs().amax(-1) / 7).float()[..., None]
    plain = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(-1)
    got = (round_to_nearest(weight, 4, 32).dequantise().view(4, 2, 32) - groups).square().sum(-1)
    assert (got <= plain * 1.0001).all()
    assert got.sum() < plain.sum()


def test_a_matrix_of_zeros_stays_zero():
    t = round_to_nearest(torch.zeros(3, 32), 4, 32)
    assert t.dequantise().eq(0).all()


def test_rows_do_not_depend_on_how_many_are_worked_on_at_a_time(monkeypatch):
    weight = matrix(0, rows=37)
    whole = round_to_nearest(weight, 4, 32)
    monkeypatch.setattr("export.quantise.ROWS", 5)
    parts = round_to_nearest(weight, 4, 32)
    assert parts.q.equal(whole.q)
    assert parts.scale.equal(whole.scale)


def test_dequantise_by_hand():
    t = QuantTensor(torch.tensor([[1, -2, 3, 4]]).char(), torch.tensor([[0.5, 2.0]]).half(), 8, 2)
    assert t.dequantise().tolist() == [[0.5, -1.0, 6.0, 8.0]]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_decoder_ends_with_what_the_integers_mean(name):
    decoder = random_decoder(VARIANTS[name])
    recipe = QuantRecipe((Rule("wte", "int8"), Rule("wpe", "fp16"), Rule("h.0.*", "int4", 16)))
    before = {k: v.clone() for k, v in decoder.state_dict().items()}
    tensors = quantise(decoder, recipe)
    assert set(tensors) == {"wte", *(m for m in matrices(decoder.spec) if m.startswith("h.0."))}
    assert {n: (t.bits, t.group_size) for n, t in tensors.items()}["wte"] == (8, 64)
    apply_rounding(decoder, recipe, tensors)
    for key, value in decoder.state_dict().items():
        module = key.removesuffix(".weight")
        if module in tensors:
            assert value.equal(tensors[module].dequantise())
            assert not value.equal(before[key])
        elif module == "wpe":
            assert value.equal(before[key].half().float())
        else:
            assert value.equal(before[key])


def test_rounding_in_place_does_not_reach_the_checkpoint_on_disk(tmp_path):
    """Its weights are memory-mapped."""
    decoder = random_decoder(spec())
    save_model_dir(tmp_path / "m", decoder.spec, decoder.state_dict(), {})
    path = tmp_path / "m" / "model.safetensors"
    before = hashlib.sha256(path.read_bytes()).digest()
    loaded = load_model_dir(tmp_path / "m")
    apply_rounding(loaded, uniform("int4"), quantise(loaded, uniform("int4")))
    assert not loaded.wte.weight.equal(decoder.wte.weight)
    assert hashlib.sha256(path.read_bytes()).digest() == before


def test_a_weight_beyond_float16_is_refused_by_name():
    decoder = random_decoder(spec())
    decoder.h[1].mlp.c_fc.weight.data[0, 0] = 1e5
    with pytest.raises(UnsupportedError, match=r"h\.1\.mlp\.c_fc holds 1e\+05"):
        apply_rounding(decoder, uniform("fp16"), {})


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_magnitude_is_found_without_floats(bits):
    t = round_to_nearest(matrix(3), bits, 32)
    assert t.largest() == t.dequantise().abs().max()


@pytest.mark.parametrize("name", ["q-mqa", "untied-tanh"])
def test_dropped_floats_are_out_of_memory_and_the_rest_is_as_it_was(name, tmp_path):
    decoder = random_decoder(VARIANTS[name])
    save_model_dir(tmp_path / "m", decoder.spec, decoder.state_dict(), {})
    decoder = load_model_dir(tmp_path / "m")
    tensors = quantise(decoder, uniform("int4"))
    apply_rounding(decoder, uniform("int4"), tensors)
    before = {k: v.clone() for k, v in decoder.state_dict().items()}
    maps, mapped = Path("/proc/self/maps"), str(tmp_path / "m" / "model.safetensors")
    if maps.exists():
        assert mapped in maps.read_text()
    drop_floats(decoder, tensors)
    if maps.exists():  # not one view of the file is left, which would keep all of it
        assert mapped not in maps.read_text()
    after = decoder.state_dict()
    assert after.keys() == before.keys()
    for key, weight in after.items():
        assert weight.is_meta == (key.removesuffix(".weight") in tensors)
        assert weight.shape == before[key].shape
        assert weight.is_meta or weight.equal(before[key])
    assert not any(p.requires_grad for p in decoder.parameters())
