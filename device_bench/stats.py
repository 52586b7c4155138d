"""Robust statistics with intervals; numpy only. Everything here is computed on read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

# Two-sided 95 % quantiles of Student's t by degrees of freedom; between two rows the fewer counts.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_T95 |= {10: 2.228, 12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}
_Z95 = 1.959964


@dataclasses.dataclass(frozen=True)
class Slope:
    """y per x, and its 95 % interval (None where the points cannot give one)."""

    value: float
    ci95: tuple[float, float] | None


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile, 0 to 100, linear between order statistics; None for no values."""
    return float(np.percentile(np.asarray(values, float), q)) if values else None


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A distribution-free 95 % interval of the median, from order statistics.

    Between the k-th smallest and the k-th largest of n values lies the median with probability
    1 - 2 P(Binomial(n, 1/2) < k). None below 6 values, where even the extremes give less than 95 %.
    """
    x, n = sorted(values), len(values)
    tail, k = 0.0, 0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n
        if 1 - 2 * tail < 0.95:
            break
        k += 1
    return (float(x[k - 1]), float(x[n - k])) if k else None


def t95(df: float) -> float:
    """How many standard errors hold 95 % with ``df`` degrees of freedom; rather too many than too few."""
    return _T95[max(k for k in _T95 if k <= max(df, 1))]


def process_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the median of positive figures, one from each process; None for one process.

    Repetitions inside a process agree with each other better than processes do, so only what
    separate processes say may be taken as independent. Up to 5: Student's t of the logarithms
    around their mean, which is at most a factor of the spread away; from 6 on the sign test's.
    """
    if len(values) < 2 or min(values) <= 0:
        return None
    if len(values) > 5:
        return median_interval(values)
    x = np.log(np.asarray(values, float))
    half = t95(x.size - 1) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return math.exp(float(x.mean()) - half), math.exp(float(x.mean()) + half)


def ratio_interval(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of mine / theirs, from figures of separate processes; None with one on a side.

    Welch's t of the logarithms, degrees of freedom by Welch and Satterthwaite (Welch 1947).
    """
    if min(len(mine), len(theirs)) < 2 or min(*mine, *theirs) <= 0:
        return None
    x, y = np.log(np.asarray(mine, float)), np.log(np.asarray(theirs, float))
    vx, vy = float(x.var(ddof=1)) / x.size, float(y.var(ddof=1)) / y.size
    below = vx**2 / (x.size - 1) + vy**2 / (y.size - 1)
    half = t95((vx + vy) ** 2 / below if below else math.inf) * math.sqrt(vx + vy)
    center = float(x.mean() - y.mean())
    return math.exp(center - half), math.exp(center + half)


def variation(values: Sequence[float]) -> float | None:
    """Coefficient of variation, standard deviation over mean; None below 2 values."""
    if len(values) < 2:
        return None
    x = np.asarray(values, float)
    return float(x.std(ddof=1) / x.mean()) if x.mean() else None


def theil_sen(x: ArrayLike, y: ArrayLike) -> Slope | None:
    """Median of the slopes of all pairs of points (Theil 1950), with Sen's 95 % interval (1968).

    The interval takes the ranks (N -/+ z sqrt(Var S)) / 2 among the N pairwise slopes, where
    Var S = (n (n-1) (2n+5) - sum t (t-1) (2t+5)) / 18 is Kendall's, t the sizes of tied x. With
    3 to 5 points ranks cannot reach 95 %: there it is the slope -/+ Student's t times the standard
    error of the residuals. None with fewer than two distinct x.
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    i, j = np.triu_indices(xs.size, 1)
    dx = xs[j] - xs[i]
    slopes = np.sort((ys[j] - ys[i])[dx != 0] / dx[dx != 0])
    if not slopes.size:
        return None
    value = float(np.median(slopes))
    n = xs.size
    if 3 <= n <= 5:
        residuals = ys - value * xs
        residuals -= residuals.mean()
        error = math.sqrt(residuals @ residuals / (n - 2) / ((xs - xs.mean()) ** 2).sum())
        return Slope(value, (value - t95(n - 2) * error, value + t95(n - 2) * error))
    ties = np.unique(xs, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
    low = math.floor((slopes.size - _Z95 * math.sqrt(variance)) / 2)
    if low < 1:
        return Slope(value, None)
    return Slope(value, (float(slopes[low - 1]), float(slopes[slopes.size - low])))
