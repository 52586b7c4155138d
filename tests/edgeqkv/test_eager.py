"""The int8 cache in eager torch, against loops written from the formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgeqkv.attention import causal_bias, scores_softmax_values
from edgeqkv.eager import cached_attend, int8_attend, logits, quantise_rows
from tests.variants import CAUSAL, random_decoder


@given(st.integers(0, 2**16), st.sampled_from([4, 8]), st.floats(1e-6, 1e4))
def test_rows_are_within_half_a_step_and_use_the_whole_range(seed, bits, size):
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(seed)) * size
    q, scale = quantise_rows(x, bits)
    most = 2 ** (bits - 1) - 1
    assert q.abs().amax(-1).eq(most).all()
    assert ((q * scale - x).abs() <= scale * 0.5001).all()


def test_a_row_of_zeros_stays_zero_and_finite():
    q, scale = quantise_rows(torch.zeros(2, 8))
    assert q.eq(0).all()
    assert scale.eq(0).all()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("shared", [True, False])
def test_folded_scales_equal_attention_over_the_dequantised_rows(groups, shared):
    model = CAUSAL["q-k=v"]
    generator = torch.Generator().manual_seed(groups)
    q = torch.randn(1, 9, 4, 16, generator=generator)
    k = torch.randn(1, 9, groups, 16, generator=generator)
    v = k if shared else torch.randn(1, 9, groups, 16, generator=generator)
    got = int8_attend(model, 9)(0, q, k, v)
    want = torch.zeros(9, 4, 16)
    for head in range(4):
        g = head // (4 // groups)
        keys, values = ((lambda c, t: c * t)(*quantise_rows(x[0, :, g])) for x in (k, v))
        for i in range(9):
            scores = [float(q[0, i, head] @ keys[j]) * 0.25 for j in range(i + 1)]
            weights = [math.exp(s - max(scores)) for s in scores]
            for j, weight in enumerate(weights):
                want[i, head] += weight / sum(weights) * values[j]
    torch.testing.assert_close(got[0], want.flatten(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["q-k=v", "q-mqa", "gqa", "q=k-v", "identity"])
def test_an_int8_cache_is_close_to_none_and_an_fp16_cache_closer(name):
    decoder = random_decoder(CAUSAL[name])
    ids = torch.arange(50)[None] * 3 % 97
    with torch.no_grad():
        want = decoder(ids)
        worst = {
            dtype: (logits(decoder, ids, cached_attend(decoder.spec, 50, dtype)) - want).abs().max()
            for dtype in ("fp16", "int8")
        }
    assert 0 < worst["fp16"] < 0.1 * worst["int8"]
    assert worst["int8"] < 0.25 * want.std()


def test_fewer_bits_cost_more():
    decoder = random_decoder(CAUSAL["q-mqa"])
    x = torch.randn(1, 30, 1, 16, generator=torch.Generator().manual_seed(0))
    q = torch.randn(1, 30, 4, 16, generator=torch.Generator().manual_seed(1))
    want = scores_softmax_values(q, x, x, 0.25, causal_bias(0, 30))
    errors = [
        (int8_attend(decoder.spec, 30, bits)(0, q, x, x) - want).norm().item() for bits in (8, 4)
    ]
    assert 8 * errors[0] < errors[1] < 40 * errors[0]
