"""How fast this machine reads memory: the limit that a decode step, which reads all weights and the
whole cache for one token, cannot pass.

Each thread takes the maximum of its own part of a working set, over and over; the best round counts.
``numpy.ndarray.max`` of bytes is a SIMD loop that reads every one of them and releases the
interpreter's lock. On an EPYC (AVX2, 32 MiB of last-level cache) it reached 67, 70, 34, 20 and 20 GB/s
over 1, 4, 16, 64 and 256 MiB where a C loop of 256-bit loads reached 82, 80, 51, 18 and 18; ``sum``
and ``dot`` stopped at 9 and 17 over 64 MiB.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from device_bench.conditions import Bandwidth

# A small model lives in a cache, a large one in memory: both limits are needed, and those between.
SIZES = tuple(mib << 20 for mib in (1, 4, 16, 64, 256))
_ROUND_BYTES = 64 << 20  # read in one round at least: starting threads then costs nothing
_SECONDS = 0.06


def measure(threads: Sequence[int], sizes: Sequence[int] = SIZES) -> list[Bandwidth]:
    """Read bandwidth for every thread count and working set; takes 2 s at most."""
    data = np.full(max(sizes), 1, np.uint8)
    return [_best(data[:nbytes], count) for count in threads for nbytes in sizes]


def _best(data: NDArray[np.uint8], threads: int) -> Bandwidth:
    parts = np.array_split(data, threads)
    passes = max(1, _ROUND_BYTES // data.size)
    best, end = math.inf, time.perf_counter() + _SECONDS
    with ThreadPoolExecutor(threads) as pool:
        rounds = 0
        while rounds < 3 or time.perf_counter() < end:
            stamps = list(pool.map(_read, parts, [passes] * threads))
            best = min(best, max(s[1] for s in stamps) - min(s[0] for s in stamps))
            rounds += 1
    return Bandwidth(threads, data.size, round(data.size * passes / best))


def _read(part: NDArray[np.uint8], passes: int) -> tuple[float, float]:
    start = time.perf_counter()
    for _ in range(passes):
        part.max()
    return start, time.perf_counter()


def limit(known: Sequence[Bandwidth] | None, threads: int, nbytes: int) -> float | None:
    """Bytes per second at which ``threads`` read a working set of ``nbytes``; None if not measured.

    Between two measured sizes: interpolated over the logarithm of the size; beyond: the nearest.
    """
    rows = sorted((b.nbytes, b.bytes_per_s) for b in known or () if b.n_threads == threads)
    if not rows or nbytes <= 0:
        return None
    sizes, rates = zip(*rows, strict=True)
    return float(np.interp(math.log(nbytes), np.log(sizes), rates))
