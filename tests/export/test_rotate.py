"""The change of basis: exact for every variant, and better for an int8 cache."""

from pathlib import Path

import pytest
import torch

from edgeqkv.eager import int8_attend, logits
from edgeqkv.errors import UnsupportedError
from edgeqkv.importers import read_checkpoint
from edgeqkv.model_dir import build
from edgeqkv.tokenizer import load_tokenizer
from export.calibrate import calibration_windows
from export.rotate import equal_elements, gauge, read_moments, rotate_cache
from tests.variants import CAUSAL, NON_CAUSAL, random_decoder, spec

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
PROJECTED = {n: s for n, s in CAUSAL.items() if s.query_mode == "projected"}
PROJECTED["no-bias"] = spec(qkv_sharing="k=v", linear_bias=False)
PROJECTED["head-dim-12"] = spec(qkv_sharing="k=v", head_dim=12, num_key_value_heads=2)
PROJECTED["wide-heads"] = spec(head_dim=32, num_key_value_heads=1)
IDS = torch.arange(4 * 48).view(4, 48) * 31 % 97


@pytest.mark.parametrize("name", PROJECTED)
@pytest.mark.parametrize("text", [True, False])
def test_every_logit_stays(name, text):
    """In float64 to 1e-10, so nothing is approximated; in float32 to 1e-5 of their spread."""
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        decoder = random_decoder(PROJECTED[name]).to(dtype)
        attend = decoder.eager_attend(48)
        if dtype == torch.float64:  # the reference mask is float32
            bias = torch.full((48, 48), -torch.inf, dtype=dtype).triu(1)

            def attend(layer, q, k, v, bias=bias, scale=decoder.spec.attention_scale):
                from edgeqkv.attention import scores_softmax_values

                return scores_softmax_values(q, k, v, scale, bias)

            decoder.eager_attend = lambda length, attend=attend: attend
        before = {k: v.clone() for k, v in decoder.state_dict().items()}
        want = logits(decoder, IDS, attend)
        rotate_cache(decoder, IDS if text else None)
        got = logits(decoder, IDS, attend)
        assert (got - want).abs().max() < tolerance * want.std()
        changed = {k for k, v in decoder.state_dict().items() if not v.equal(before[k])}
        projections = {k.split(".")[3] for k in changed}
        query_is_key = decoder.spec.qkv_sharing in ("q=k", "q=k=v")
        assert projections == {*decoder.spec.projections, "o_proj"} - (
            {"q_proj"} if query_is_key else set()
        )


@pytest.mark.parametrize("name", ["identity", "residual", "residual-gelu", "identity-k=v"])
def test_a_query_that_is_the_input_is_refused_with_the_reason(name):
    with pytest.raises(UnsupportedError, match="no weight can absorb the inverse"):
        rotate_cache(random_decoder(CAUSAL[name]))


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(UnsupportedError, match="keeps no cache"):
        rotate_cache(random_decoder(NON_CAUSAL["(q=k-v)+"]))


@pytest.mark.parametrize("dim", [1, 2, 12, 16, 64, 80])
def test_h_is_orthogonal_and_a_power_of_two_has_equal_elements(dim):
    h = equal_elements(dim)
    torch.testing.assert_close(h @ h.T, torch.eye(dim, dtype=torch.float64))
    if dim & (dim - 1) == 0:
        assert h.abs().std(correction=0) < 1e-12


def test_the_gauge_minimises_what_it_says_and_gives_equal_variances():
    generator = torch.Generator().manual_seed(0)
    make = lambda: (lambda x: x @ x.T)(torch.randn(16, 16, generator=generator).double())  # noqa: E731
    rows, readers = make(), make()

    def cost(m):
        inverse = torch.linalg.inv(m)
        return (m.T @ rows @ m).trace() * (inverse @ readers @ inverse.T).trace()

    best = gauge(16, rows, readers)
    variances = (best.T @ rows @ best).diagonal()
    assert variances.std() < 0.05 * variances.mean()
    diagonal = torch.diag((readers.diagonal() / rows.diagonal()) ** 0.25)
    assert cost(best) < cost(diagonal) <= cost(torch.eye(16).double())
    for _ in range(20):
        nudge = torch.eye(16) + 0.05 * torch.randn(16, 16, generator=generator)
        assert cost(best) < 1.001 * cost(best @ nudge.double())
    rigid = gauge(16, rows, readers, orthogonal=True)
    torch.testing.assert_close(rigid @ rigid.T, torch.eye(16).double())


def test_moments_by_hand():
    decoder = random_decoder(CAUSAL["gqa"])
    found = read_moments(decoder, IDS)[0]
    x = decoder.h[0].ln_1(decoder.wte(IDS) + decoder.wpe(torch.arange(48)))
    q, k, v = (t.double() for t in decoder.h[0].attn.project(x))
    head = q[:, :, 3].flatten(0, 1)  # the second head of the second group
    torch.testing.assert_close(found.q[1, 1], head.T @ head / 192)
    for moment, rows in ((found.k, k), (found.v, v)):
        flat = rows[:, :, 1].flatten(0, 1)
        torch.testing.assert_close(moment[1], flat.T @ flat / 192)


def cache_error(decoder, ids, bits):
    attend = int8_attend(decoder.spec, ids.shape[1], bits)
    return float((logits(decoder, ids, attend) - decoder(ids)).square().mean().sqrt())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_channel_that_dwarfs_the_others_no_longer_sets_the_scale(bits):
    decoder = random_decoder(CAUSAL["q-mqa"])
    for block in decoder.h:  # what a gauge of the trainer's could have been
        block.attn.k_proj.weight[3] *= 30
        block.attn.k_proj.bias[3] *= 30
        block.attn.q_proj.weight.view(4, 16, -1)[:, 3] /= 30
        block.attn.q_proj.bias.view(4, 16)[:, 3] /= 30
        block.attn.o_proj.weight.view(-1, 4, 16)[:, :, 3] /= 30
    before = cache_error(decoder, IDS, bits)
    rotate_cache(decoder, IDS)
    assert cache_error(decoder, IDS, bits) < 0.25 * before


@pytest.mark.parametrize("name", ["kjv-q-kv", "kjv-q-mqa"])
def test_on_trained_models_the_cache_rounds_better_on_text_it_was_not_fitted_to(name):
    imported = read_checkpoint(str(CHECKPOINTS / f"{name}.pt"))
    tokenizer = load_tokenizer(str(CHECKPOINTS / "tokenizer.json"))
    text = (CHECKPOINTS / "held_out.txt").read_text()
    windows = calibration_windows(tokenizer.encode(text[:30_000]).ids, 1024)
    ids = torch.tensor(tokenizer.encode(text[30_000:]).ids[:2048]).view(8, 256)
    decoder = build(imported.spec, imported.state)
    with torch.no_grad():
        before = [cache_error(decoder, ids, bits) for bits in (8, 4)]
        rotate_cache(decoder, windows)
        after = [cache_error(decoder, ids, bits) for bits in (8, 4)]
    assert all(a < 0.95 * b for a, b in zip(after, before, strict=True))
