"""GPTQ against a writing of it straight from the paper, and against rounding on trained models."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from edgeqkv.errors import TextError, UnsupportedError
from edgeqkv.importers import read_checkpoint
from edgeqkv.model_dir import build
from edgeqkv.quant import QuantRecipe, Rule, matrices, uniform
from edgeqkv.tokenizer import load_tokenizer
from export.calibrate import (
    DAMPING,
    calibrate,
    calibration_windows,
    gptq,
    input_moments,
    prepare,
)
from export.quantise import best_scales, round_to_nearest
from tests.variants import VARIANTS, random_decoder, spec

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def problem(seed, rows=12, columns=160):
    """A weight and the Hessian of strongly correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) * torch.rand(columns) ** 3
    x = torch.randn(400, columns, generator=generator) @ mix
    return weight, x.T @ x


def loss(weight, hessian, t):
    d = t.dequantise() - weight
    return float(((d @ hessian) * d).sum())


def from_the_paper(weight, hessian, bits, group):
    """Round a column, spread its error, remove it from the inverse Hessian: no blocks, no Cholesky."""
    weight, scale = weight.double(), best_scales(weight, bits, group).double()
    order = torch.argsort(hessian.diagonal(), descending=True).tolist()
    h = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    left, inverse, q = weight.clone(), torch.linalg.inv(h), torch.zeros_like(weight)
    most = 2 ** (bits - 1)
    for j in order:
        step = scale[:, j // group]
        q[:, j] = (left[:, j] / step).round().clamp(-most, most - 1)
        error = (left[:, j] - q[:, j] * step) / inverse[j, j]
        left -= error[:, None] * inverse[j]
        inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return q


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_and_cholesky_give_the_integers_of_the_plain_algorithm(bits):
    weight, hessian = problem(0)
    got = gptq(weight, hessian, bits, 32)
    want = from_the_paper(weight, hessian, bits, 32)
    # float32 against float64: a value on the border between two integers may fall either way,
    # and then changes what its row does after it.
    assert (got.q == want).float().mean() > 0.97


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_are_closer_than_by_rounding(seed, bits):
    weight, hessian = problem(seed)
    by_rounding = loss(weight, hessian, round_to_nearest(weight, bits, 32))
    assert loss(weight, hessian, gptq(weight, hessian, bits, 32)) < 0.6 * by_rounding


def test_uncorrelated_inputs_leave_nothing_to_gain():
    weight, _ = problem(1)
    got, want = gptq(weight, torch.eye(160), 4, 32), round_to_nearest(weight, 4, 32)
    assert got.q.equal(want.q)
    assert got.scale.equal(want.scale)


def test_inputs_that_are_always_zero_or_equal_do_no_harm():
    weight, hessian = problem(2)
    hessian[:, 5], hessian[5] = 0, 0
    hessian[:, 7], hessian[7] = hessian[:, 6].clone(), hessian[6].clone()
    t = gptq(weight, hessian, 4, 32)
    assert torch.isfinite(t.dequantise()).all()
    assert gptq(weight, torch.zeros(160, 160), 4, 32).q.equal(round_to_nearest(weight, 4, 32).q)


def test_infinite_activations_are_refused():
    weight, hessian = problem(3)
    hessian[0, 0] = torch.nan
    with pytest.raises(UnsupportedError, match="infinite or NaN"):
        gptq(weight, hessian, 4, 32)


def test_moments_are_of_what_each_layer_really_reads():
    decoder = random_decoder(VARIANTS["q-mqa"])
    block, attend = decoder.h[0], decoder.eager_attend(8)
    states = torch.randn(11, 8, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        moments = input_moments(block, states, attend)
        x = block.ln_1(states)
        mixed = attend(0, *block.attn.project(x))
        y = block.ln_2(states + block.attn.o_proj(mixed))
        inner = F.gelu(block.mlp.c_fc(y))
    assert list(moments) == ["attn.q_proj", "attn.k_proj", "attn.o_proj", "mlp.c_fc", "mlp.c_proj"]
    for moment, inputs in zip(moments.values(), (x, x, mixed, y, inner), strict=True):
        rows = inputs.flatten(0, 1)
        torch.testing.assert_close(moment, rows.T @ rows, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_calibrated_whole_and_ends_rounded(name):
    decoder = random_decoder(VARIANTS[name])
    recipe = uniform("int4", 16)
    windows = torch.arange(3 * 24).view(3, 24) % 97
    done = []
    tensors = calibrate(decoder, recipe, windows, done.append)
    assert set(tensors) == set(matrices(decoder.spec)) - {"wpe"}
    assert done == ["GPTQ of the head", "GPTQ of layer 0", "GPTQ of layer 1"]
    for module, tensor in tensors.items():
        assert decoder.get_parameter(f"{module}.weight").equal(tensor.dequantise())
    wpe = decoder.wpe.weight
    assert wpe.equal(wpe.half().float())


def test_a_mixed_recipe_touches_only_what_it_names():
    decoder, before = (random_decoder(VARIANTS["untied-tanh"]) for _ in range(2))
    recipe = QuantRecipe((Rule("h.1.mlp.*", "int4", 32), Rule("lm_head", "int8")))
    tensors = calibrate(decoder, recipe, torch.arange(48).view(2, 24))
    assert set(tensors) == {"h.1.mlp.c_fc", "h.1.mlp.c_proj", "lm_head"}
    for key, value in decoder.state_dict().items():
        if key.removesuffix(".weight") not in tensors:
            assert value.equal(before.state_dict()[key])


def test_windows_are_spread_over_the_whole_text():
    windows = calibration_windows(list(range(100_000)), 1024)
    assert windows.shape == (64, 256)
    assert (windows[0, 0], windows[-1, -1]) == (0, 99_999)
    assert calibration_windows(list(range(2000)), 100).shape == (20, 100)
    with pytest.raises(TextError, match="has 1000 tokens, needed: 1024"):
        calibration_windows(list(range(1000)), 64)


def test_what_the_manifest_will_say(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abc")
    ids = [i % 97 for i in range(1100)]

    def made(weights, **options):
        q = prepare(random_decoder(spec()), uniform(weights), **options)[1]
        return q.method, q.cache_rotation, q.calibration_tokens

    assert made("fp32") == ("none", "none", None)
    assert made("int8") == ("rtn", "none", None)
    assert made("fp16", rotate=True) == ("none", "hadamard", None)
    assert made("fp32", rotate=True, text=text, ids=ids) == ("none", "balanced", 17 * 64)
    assert made("int4", rotate=True, text=text, ids=ids) == ("gptq", "balanced", 17 * 64)
    quantisation = prepare(random_decoder(spec()), uniform("int4"), text=text, ids=ids)[1]
    assert quantisation.calibration_sha256.startswith("ba7816bf8f01cfea")  # sha256("abc")


@pytest.mark.parametrize("name", ["kjv-q-kv", "kjv-q-mqa"])
def test_on_trained_models_it_beats_rounding_on_text_that_neither_saw(name):
    """Calibrated on the first half of the held-out text, measured on the second."""
    imported = read_checkpoint(str(CHECKPOINTS / f"{name}.pt"))
    text = (CHECKPOINTS / "held_out.txt").read_text()
    tokenizer = load_tokenizer(str(CHECKPOINTS / "tokenizer.json"))
    first, second = (tokenizer.encode(part).ids for part in (text[:30_000], text[30_000:]))
    ids = torch.tensor(second[: 8 * 512]).view(8, 512)
    model = build(imported.spec, imported.state)
    with torch.no_grad():
        want = model(ids).log_softmax(-1)

    def divergence(bits, ids_to_read):
        decoder = build(imported.spec, {k: v.clone() for k, v in imported.state.items()})
        text = Path(__file__) if ids_to_read else None
        prepare(decoder, uniform(f"int{bits}"), text=text, ids=ids_to_read)
        with torch.no_grad():
            return F.kl_div(decoder(ids).log_softmax(-1), want, log_target=True, reduction="sum")

    for bits in (4, 8):
        assert divergence(bits, first) < 0.65 * divergence(bits, ())
