"""Memory of this process, read from /proc: whole-process snapshots and exact resident bytes.

Linux and Android only; elsewhere everything is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from device_bench.result import Snapshot
from edgeqkv.cache import CacheSpec

METHOD = "/proc/self/smaps_rollup at the end of each stage; peak from VmHWM; no sampling"
# glibc gives blocks of this size or more a mapping of their own, so that a cache which the runtime
# allocates can be told from the rest of the heap, and freed memory goes back to the system at once. Without top
# padding: a block that fits the heap's spare end would be put there.
WORKER_ENV = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}

_PROC = Path("/proc/self")
_PR_SET_THP_DISABLE, _PR_SET_PDEATHSIG, _SIGKILL = 41, 1, 9
# Bits of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst in the kernel).
_PRESENT, _SWAPPED, _FILE_OR_SHARED, _EXCLUSIVE = (np.uint64(1 << b) for b in (63, 62, 61, 56))


def supported() -> bool:
    return (_PROC / "smaps_rollup").exists()


def page_granular() -> None:
    """Turn transparent huge pages off for this process: memory then follows use page by page."""
    _prctl(_PR_SET_THP_DISABLE, 1)


def die_with_parent() -> None:
    """Be killed when the parent is, so that a hanging worker never outlives its sweep."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def snapshot() -> Snapshot | None:
    """What the process holds now, bytes; None where the kernel has no smaps_rollup."""
    if not supported():
        return None
    kib = _fields(_PROC / "smaps_rollup")
    return Snapshot(
        rss=kib["Rss"],
        pss=kib["Pss"],
        uss=kib["Private_Clean"] + kib["Private_Dirty"],
        anonymous=kib["Anonymous"],
        swap=kib["Swap"],
        file_clean=kib["Private_Clean"] + kib["Shared_Clean"],
        private_dirty=kib["Private_Dirty"],
    )


def peak_rss() -> int:
    """VmHWM, bytes: the most that was ever resident at once since the process started."""
    return _fields(_PROC / "status")["VmHWM"]


def _fields(path: Path) -> dict[str, int]:
    """The ``Name:  123 kB`` lines of a /proc file, in bytes."""
    rows = (line.split() for line in path.read_text("ascii", "replace").splitlines())
    return {row[0][:-1]: int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def process_bytes(now: Snapshot) -> int:
    """What cannot be dropped and is ours alone: private dirty pages, anonymous or not, and swap."""
    return now.private_dirty + now.swap


def resident_bytes(regions: Sequence[tuple[int, int]]) -> int | None:
    """Bytes of the (address, nbytes) regions that are in memory or in swap, each counted once.

    Exact to the byte at the ends of a region and to the page inside. Read from pagemap, which a
    process may always do for itself; from smaps where that is shut; None where neither tells.
    """
    merged = merge(regions)
    try:
        with (_PROC / "pagemap").open("rb", buffering=0) as f:
            return sum(_resident(f.fileno(), start, end) for start, end in merged)
    except OSError:
        return _from_smaps(merged)


def merge(regions: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, nbytes) regions as sorted, disjoint (start, end): aliases are not counted twice."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((a, a + n) for a, n in regions if n > 0):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _resident(pagemap: int, start: int, end: int) -> int:
    page = mmap.PAGESIZE
    first, last = start // page, -(-end // page)
    data = os.pread(pagemap, 8 * (last - first), 8 * first)
    if len(data) != 8 * (last - first):
        raise OSError("pagemap is shorter than the address space")
    entries = np.frombuffer(data, np.uint64)
    # The shared page of zeros, which a read of untouched memory maps, is present and belongs to
    # nobody: it costs nothing and is neither exclusive nor a file's.
    owned = (entries & _EXCLUSIVE != 0) | (entries & _FILE_OR_SHARED != 0)
    held = (entries & _SWAPPED != 0) | ((entries & _PRESENT != 0) & owned)
    starts = (np.arange(first, last, dtype=np.int64) * page).clip(start, end)
    ends = (np.arange(first + 1, last + 1, dtype=np.int64) * page).clip(start, end)
    return int((ends - starts)[held].sum())


def _from_smaps(merged: Sequence[tuple[int, int]]) -> int | None:
    """Rss + Swap of the mappings inside the regions; None when one reaches beyond them."""
    page, total, inside = mmap.PAGESIZE, 0, False
    for line in (_PROC / "smaps").read_text("ascii", "replace").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(part, 16) for part in words[0].split("-"))
            over = [(s, e) for s, e in merged if low < e and s < high]
            inside = bool(over)
            if any(low < s - s % page or high > -(-e // page) * page for s, e in over):
                return None
        elif inside and words[0] in ("Rss:", "Swap:"):
            total += int(words[1]) * 1024
    return total


def tokens_per_page(cache: CacheSpec, page: int = mmap.PAGESIZE) -> int:
    """Least number of tokens whose rows fill whole pages of every cache tensor.

    The finest contiguous runs are one head's rows, head_dim * itemsize bytes a token, and its scales.
    Depths that are multiples of this leave every run at the same offset in its page, so that the
    resident bytes grow by exactly the rows written, wherever the runs start.
    """
    rows = (cache.head_dim * cache.itemsize, cache.scale_itemsize)
    return math.lcm(*(page // math.gcd(page, row) for row in rows if row))


def slope_depths(
    cache: CacheSpec, capacity: int, *, want: int = 8, least: int = 6, page: int = mmap.PAGESIZE
) -> list[int]:
    """Depths at which a growing cache is read, evenly apart, multiples of tokens_per_page.

    They span what makes the cache grow by 8 MiB, far above the process's noise, or the capacity.
    Empty when the capacity holds fewer than ``least`` of them. The scales of an int8 cache fill a page
    only every 1024 tokens: where that divides the capacity, so that every run starts on a page, fewer
    depths do, from 0 on; they tell the slope exactly, without an interval.
    """
    unit = tokens_per_page(cache, page)
    units = capacity // unit
    if cache.scale_itemsize and cache.bytes_per_token and units < least and capacity % unit == 0:
        return [unit * i for i in range(units + 1)]
    if units < least or not cache.bytes_per_token:
        return []
    span = max(want, -(-(8 << 20) // cache.bytes_per_token) // unit)
    count = min(want, units)
    step = max(1, min(span, units) // count)
    return [unit * step * (i + 1) for i in range(count)]
