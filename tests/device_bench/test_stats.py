import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_bench.stats import (
    median_interval,
    percentile,
    process_interval,
    ratio_interval,
    t95,
    theil_sen,
    variation,
)

reals = st.floats(-1e6, 1e6, allow_nan=False)
samples = st.lists(reals, min_size=1, max_size=60)


@given(samples, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_stay_between_the_extremes_and_ascend(values, p, q):
    low, high = sorted((p, q))
    a, b = percentile(values, low), percentile(values, high)
    slack = 1e-9 * max(1, max(map(abs, values)))
    assert min(values) - slack <= a <= b + slack <= max(values) + 2 * slack


@given(samples)
def test_percentiles_at_the_order_statistics_are_the_samples(values):
    ordered = sorted(values)
    for i, value in enumerate(ordered):
        q = 100 * i / max(1, len(values) - 1)
        assert percentile(values, q) == pytest.approx(value, rel=1e-6, abs=1e-3)


def test_nothing_measured_is_none_and_not_zero():
    assert percentile([], 50) is None
    assert median_interval([]) is None
    assert theil_sen([], []) is None
    assert theil_sen([5, 5, 5], [1, 2, 3]) is None


@given(st.lists(reals, min_size=6, max_size=40))
def test_median_interval_holds_the_median(values):
    low, high = median_interval(values)
    assert low <= float(np.median(values)) <= high


@pytest.mark.parametrize(("n", "ranks"), [(5, None), (6, (1, 6)), (9, (2, 8)), (20, (6, 15))])
def test_median_interval_takes_the_ranks_of_the_sign_test(n, ranks):
    # The ranks are those of the tables for the sign test (e.g. Conover, Practical Nonparametric
    # Statistics): n = 20 gives the 6th and the 15th.
    assert median_interval(range(1, n + 1)) == ranks


slopes = st.integers(-10_000, 10_000)
depths = st.lists(st.integers(0, 4096), min_size=6, max_size=12, unique=True)


@given(depths, slopes, st.integers(-(10**9), 10**9))
def test_a_line_gives_its_slope_exactly_and_a_closed_interval(x, slope, intercept):
    found = theil_sen(x, [slope * v + intercept for v in x])
    assert found.value == slope
    assert found.ci95 == (slope, slope)


@given(depths, slopes, st.integers(-(10**9), 10**9))
def test_one_wild_point_does_not_move_the_slope(x, slope, wild):
    x = sorted(x)
    y = [slope * v for v in x]
    y[len(y) // 2] += wild
    assert theil_sen(x, y).value == pytest.approx(slope, abs=1e-6)


@given(depths, st.integers(0, 2**32), st.floats(-100, 100), st.floats(-1e4, 1e4))
def test_slope_shifts_scales_and_reverses_with_its_points(x, seed, tilt, shift):
    y = np.random.default_rng(seed).normal(size=len(x))
    base, tilted = theil_sen(x, y), theil_sen(x, y + tilt * np.array(x) + shift)
    assert tilted.value == pytest.approx(base.value + tilt, abs=1e-6)
    assert base.ci95[0] <= base.value <= base.ci95[1]
    mirrored = theil_sen(x, -y)
    assert mirrored.value == pytest.approx(-base.value)
    assert mirrored.ci95 == pytest.approx((-base.ci95[1], -base.ci95[0]))


@given(st.permutations(range(8)), st.integers(0, 2**32))
def test_order_of_the_points_does_not_matter(order, seed):
    x, y = np.arange(8.0), np.random.default_rng(seed).normal(size=8)
    assert theil_sen(x[list(order)], y[list(order)]) == theil_sen(x, y)


def test_interval_covers_the_truth_as_often_as_it_claims():
    rng, inside, rounds = np.random.default_rng(0), 0, 400
    x = np.arange(8) * 128.0
    for _ in range(rounds):
        low, high = theil_sen(x, 512 * x + rng.normal(0, 40_000, x.size)).ci95
        inside += low <= 512 <= high
    assert inside / rounds >= 0.93


@pytest.mark.parametrize("n", [3, 4, 5])
def test_few_points_fall_back_on_student_t(n):
    x, y = np.arange(n, dtype=float), np.arange(n) * 10.0
    assert theil_sen(x, y).ci95 == (10, 10)
    rng, inside = np.random.default_rng(n), 0
    for _ in range(400):
        low, high = theil_sen(x, y + rng.normal(0, 1, n)).ci95
        inside += low <= 10 <= high
    assert inside / 400 >= 0.90


def test_two_points_give_a_slope_without_an_interval():
    found = theil_sen([0, 10], [5, 25])
    assert (found.value, found.ci95) == (2, None)


@pytest.mark.parametrize("n", range(6, 13))
def test_agrees_with_scipy_where_it_is_installed(n):
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(n)
    x, y = np.sort(rng.uniform(0, 100, n)), rng.normal(size=n)
    theirs = scipy_stats.theilslopes(y, x, 0.95)
    ours = theil_sen(x, y)
    assert ours.value == pytest.approx(theirs.slope)
    # Ours rounds the ranks outwards, so it is the same interval or the next wider one.
    assert ours.ci95[0] <= theirs.low_slope + 1e-12
    assert ours.ci95[1] >= theirs.high_slope - 1e-12
    assert math.isfinite(ours.ci95[0])


@pytest.mark.parametrize(("df", "t"), [(1, 12.706), (2.9, 4.303), (4, 2.776), (500, 1.980)])
def test_student_s_t_is_that_of_the_tables_and_never_too_small(df, t):
    assert t95(df) == t


def test_one_process_gives_no_interval():
    assert process_interval([5.0]) is process_interval([]) is None
    assert ratio_interval([5.0], [4.0, 4.1]) is None
    assert variation([5.0]) is None
    assert variation([9.0, 11.0]) == pytest.approx(math.sqrt(2) / 10)


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=12))
def test_process_interval_holds_the_median_and_scales(values):
    low, high = process_interval(values)
    middle = float(np.median(values))
    assert low <= middle * (1 + 1e-9)
    assert middle <= high * (1 + 1e-9)
    assert process_interval([3 * v for v in values]) == pytest.approx((3 * low, 3 * high))


@pytest.mark.parametrize(("n", "least"), [(2, 0.93), (3, 0.93), (5, 0.93), (8, 0.93)])
def test_intervals_over_processes_cover_the_truth_as_often_as_they_claim(n, least):
    """Repetitions share the offset of their process; only the processes' figures are independent."""
    rng, inside, ratios, rounds = np.random.default_rng(n), 0, 0, 600
    for _ in range(rounds):
        mine, theirs = (100 * np.exp(rng.normal(0, 0.03, n)) for _ in range(2))
        low, high = process_interval(mine.tolist())
        inside += low <= 100 <= high
        low, high = ratio_interval(mine.tolist(), theirs.tolist())
        ratios += low <= 1 <= high
    assert inside / rounds >= least
    assert ratios / rounds >= least


def test_ratio_interval_by_hand():
    # log ratios: both sides have standard error s / sqrt(2) with 1 degree of freedom each, 2 together.
    mine, theirs = [math.e**0.1, math.e**0.3], [math.e**0.0, math.e**0.2]
    half = 4.303 * math.sqrt(0.02 / 2 * 2)
    assert ratio_interval(mine, theirs) == pytest.approx(
        (math.exp(0.1 - half), math.exp(0.1 + half))
    )
    assert ratio_interval([2.0, 2.0], [1.0, 1.0]) == (2, 2)
