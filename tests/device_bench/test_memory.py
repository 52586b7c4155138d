import mmap
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_bench import memory
from edgeqkv.cache import CacheSpec

PAGE = mmap.PAGESIZE
linux = pytest.mark.skipif(not memory.supported(), reason="needs /proc/self/smaps_rollup")


def _mapping(pages, flags=None):
    memory.page_granular()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if flags is None else flags
    held = mmap.mmap(-1, pages * PAGE, flags=flags)
    return held, np.frombuffer(held, np.uint8)


@linux
@pytest.mark.parametrize("flags", [None, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS])
def test_written_pages_are_counted_exactly(flags):
    _, bytes_ = _mapping(64, flags)
    region = (bytes_.ctypes.data, bytes_.nbytes)
    assert memory.resident_bytes([region]) == 0
    bytes_[: 10 * PAGE] = 1
    assert memory.resident_bytes([region]) == 10 * PAGE
    bytes_[40 * PAGE] = 1
    assert memory.resident_bytes([region]) == 11 * PAGE
    # a region that starts and ends inside pages counts its own bytes only; an alias counts once
    part = (bytes_.ctypes.data + 100, 2 * PAGE)
    assert memory.resident_bytes([part]) == 2 * PAGE
    assert memory.resident_bytes([region, region, part]) == 11 * PAGE


@linux
def test_reading_untouched_memory_costs_nothing():
    _, bytes_ = _mapping(64)
    assert int(bytes_.sum()) == 0  # maps the shared page of zeros 64 times
    assert memory.resident_bytes([(bytes_.ctypes.data, bytes_.nbytes)]) == 0


@linux
def test_released_memory_is_gone():
    held, bytes_ = _mapping(16)
    bytes_[:] = 1
    held.madvise(mmap.MADV_DONTNEED)
    assert memory.resident_bytes([(bytes_.ctypes.data, bytes_.nbytes)]) == 0


@linux
def test_smaps_gives_the_same_answer_or_none():
    # shared mappings are never merged with their neighbours, so smaps can tell
    _, bytes_ = _mapping(32, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    bytes_[: 5 * PAGE] = 1
    start = bytes_.ctypes.data
    assert memory._from_smaps([(start, start + bytes_.nbytes)]) == 5 * PAGE
    assert memory._from_smaps([(start, start + 4 * PAGE)]) is None


@linux
def test_snapshot_sees_what_was_allocated():
    before = memory.snapshot()
    assert before.rss >= before.pss >= before.uss >= before.private_dirty
    _, bytes_ = _mapping(2048)
    bytes_[:] = 1
    after = memory.snapshot()
    for field in ("rss", "pss", "uss", "anonymous", "private_dirty"):
        grown = getattr(after, field) - getattr(before, field)
        assert grown == pytest.approx(2048 * PAGE, abs=64 * PAGE), field
    assert memory.peak_rss() >= after.rss
    assert memory.process_bytes(after) == after.private_dirty + after.swap


@pytest.mark.skipif(sys.platform == "linux", reason="what other systems answer")
def test_other_systems_answer_none():
    assert memory.snapshot() is None
    assert memory.resident_bytes([(0, PAGE)]) is None


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=12))
def test_merged_regions_cover_the_same_bytes_once(regions):
    merged = memory.merge(regions)
    covered = {b for start, n in regions for b in range(start, start + n)}
    assert sum(end - start for start, end in merged) == len(covered)
    assert {b for start, end in merged for b in range(start, end)} == covered


caches = st.builds(
    CacheSpec,
    layout=st.sampled_from(["shared", "separate"]),
    num_layers=st.integers(1, 40),
    num_key_value_heads=st.integers(1, 32),
    head_dim=st.integers(1, 256),
    capacity=st.integers(1, 33_000),
    dtype=st.sampled_from(["fp32", "fp16", "int8"]),
)


@given(caches)
def test_depths_fill_whole_pages_and_fit(cache):
    unit = memory.tokens_per_page(cache)
    assert unit * cache.head_dim * cache.itemsize % PAGE == 0
    assert unit * cache.scale_itemsize % PAGE == 0
    depths = memory.slope_depths(cache, cache.capacity)
    if not depths:
        assert cache.capacity // unit < 6
        return
    if depths[0] == 0:  # few pages of scales: every one of them
        assert cache.dtype == "int8"
        assert depths == list(range(0, cache.capacity + 1, unit))
        return
    assert 6 <= len(depths) <= 8
    assert len({b - a for a, b in zip([0, *depths[:-1]], depths, strict=True)}) == 1
    assert all(d % unit == 0 for d in depths)
    assert depths[-1] <= cache.capacity


@linux
@given(st.integers(0, PAGE - 1), st.sampled_from([32, 48, 96, 100, 128, 256, 1000, 4096]))
def test_slope_over_such_depths_is_exact_wherever_the_rows_start(offset, row):
    """The claim of tokens_per_page, on real pages: the bias is the same at every depth."""
    cache = CacheSpec("shared", 1, 1, row // 2, 4096, "fp16")
    unit = memory.tokens_per_page(cache)
    _, bytes_ = _mapping(-(-unit * 3 * row // PAGE) + 2)
    region = (bytes_.ctypes.data + offset, unit * 3 * row)
    held = []
    for depth in (unit, 2 * unit, 3 * unit):
        bytes_[offset : offset + depth * row] = 1
        held.append(memory.resident_bytes([region]))
    # the last point ends with the region, so it has no page reaching beyond the rows written
    assert held[1] - held[0] == unit * row
