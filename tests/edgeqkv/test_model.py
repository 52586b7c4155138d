"""The decoder against loops written from the papers' formulas, one number at a time."""

import math

import numpy as np
import pytest
import torch

from edgeqkv.attention import position_features, positional_scores, scores_softmax_values
from tests.variants import CAUSAL, NON_CAUSAL, random_decoder


def ids_for(spec, length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, spec.used_tokens, (2, length), generator=generator)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_later_token_changes_nothing_before_it(name):
    decoder = random_decoder(CAUSAL[name])
    ids = ids_for(decoder.spec, 12)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % decoder.spec.used_tokens
    before, after = decoder(ids), decoder(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-5, rtol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-3


def test_a_non_causal_model_sees_later_tokens():
    decoder = random_decoder(NON_CAUSAL["(q=k-v)+"])
    ids = ids_for(decoder.spec, 12)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % decoder.spec.used_tokens
    assert (decoder(ids)[:, :7] - decoder(changed)[:, :7]).abs().max() > 1e-3


def attention_by_loops(q, k, v, score):
    """q [S,H,D], k and v [S,G,D]; score(h, i, j) -> number, -inf where i may not see j."""
    length, heads, dim = q.shape
    group = heads // k.shape[1]  # repeat_interleave: heads 0..group-1 read key head 0
    out = np.zeros((length, heads, dim))
    for h in range(heads):
        for i in range(length):
            scores = np.array([score(h, i, j) for j in range(length)])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[i, h] = sum(weights[j] * v[j, h // group] for j in range(length))
    return out.reshape(length, heads * dim)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_head_groups_are_repeat_interleave(groups):
    generator = torch.Generator().manual_seed(groups)
    q = torch.randn(1, 5, 4, 8, generator=generator)
    k, v = (torch.randn(1, 5, groups, 8, generator=generator) for _ in range(2))
    bias = torch.full((5, 5), -math.inf).triu(1)
    got = scores_softmax_values(q, k, v, 0.3, bias)[0]
    nq, nk, nv = (t[0].double().numpy() for t in (q, k, v))

    def score(h, i, j):
        return -np.inf if j > i else 0.3 * nq[i, h] @ nk[j, h // (4 // groups)]

    np.testing.assert_allclose(got, attention_by_loops(nq, nk, nv, score), atol=1e-5)


def features_by_loops(length, m):
    """P[i,j,c] of the + term: m // 2 channels of sin/cos of the row, the rest of the column."""
    half = m // 2
    p = np.zeros((length, length, m))
    for i in range(length):
        for j in range(length):
            for c in range(m):
                position, index, n = (i, c, half) if c < half else (j, c - half, m - half)
                angle = position * math.exp(-(index // 2 * 2) * math.log(10000.0) / n)
                p[i, j, c] = math.cos(angle) if index % 2 else math.sin(angle)
    return p


@pytest.mark.parametrize("m", [10, 7, 2, 1])
def test_position_features(m):
    got = position_features(20, m)
    assert got.shape == (20, 20, m)
    np.testing.assert_allclose(got, features_by_loops(20, m), atol=1e-5)


def test_the_plus_term_against_a_direct_loop():
    generator = torch.Generator().manual_seed(5)
    q, v = (torch.randn(1, 6, 2, 8, generator=generator) for _ in range(2))
    pos_w, pos_b = torch.randn(10, generator=generator), torch.tensor([0.7])
    got = positional_scores(q, q, v, 0.35, position_features(6, 10), pos_w, pos_b)[0]
    nq, nv, w = q[0].double().numpy(), v[0].double().numpy(), pos_w.double().numpy()
    p = features_by_loops(6, 10)

    def score(h, i, j):
        plain = 0.35 * nq[i, h] @ nq[j, h]
        return plain * w.sum() + sum(w[c] * p[i, j, c] for c in range(10)) + 0.7

    np.testing.assert_allclose(got, attention_by_loops(nq, nq, nv, score), atol=1e-5)


def test_the_plus_term_reaches_the_logits():
    decoder = random_decoder(NON_CAUSAL["(q=k-v)+"])
    ids = ids_for(decoder.spec, 9)
    before = decoder(ids)
    with torch.no_grad():
        decoder.h[0].attn.pos_w[8] += 0.5  # a column channel
    assert (before - decoder(ids)).abs().max() > 1e-3


def test_run_is_the_last_row_of_forward():
    decoder = random_decoder(CAUSAL["q-mqa"])
    ids = ids_for(decoder.spec, 9)
    last = decoder.run(ids, torch.arange(9), decoder.eager_attend(9))
    torch.testing.assert_close(last, decoder(ids)[:, -1:], atol=1e-5, rtol=0)
