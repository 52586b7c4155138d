import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeqkv.limits import THRESHOLDS
from export.verify import _failure, compare_logits

ROWS = arrays(np.float32, (3, 17), elements=st.floats(-30, 30, width=32))


@given(ROWS)
def test_equal_logits_pass_the_strictest_threshold(rows):
    c = compare_logits("same", rows, rows)
    assert (c.max_abs, c.top1) == (0.0, 1.0)
    assert c.kl < 1e-9
    if np.linalg.norm(rows, axis=1).min() > 1e-6:  # the cosine of a zero vector is not defined
        assert _failure([c], THRESHOLDS["fp32"]) is None


@given(ROWS, st.integers(0, 2), st.integers(0, 16))
def test_one_nan_fails(rows, i, j):
    broken = rows.copy()
    broken[i, j] = np.nan
    assert _failure([compare_logits("nan", broken, rows)], THRESHOLDS["fp16"])


def test_each_figure_against_hand_computed_values():
    want = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    got = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    c = compare_logits("swapped", got, want)
    assert np.isclose(c.max_abs, np.log(2))
    assert np.isclose(c.kl, 0.5 * np.log(2) - 0.25 * np.log(2))
    assert c.top1 == 0.0
    assert c.rows == 1


def test_a_constant_shift_changes_no_probability_but_is_still_a_difference():
    want = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    c = compare_logits("shifted", want + 1, want)
    assert c.kl < 1e-6
    assert _failure([c], THRESHOLDS["fp16"])
