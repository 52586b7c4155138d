"""Find large malloc blocks in this process, so that memory which a runtime owns can be measured.

glibc gives a block of MALLOC_MMAP_THRESHOLD_ bytes or more a mapping of its own. It starts on a
page with the words prev_size = 0 and size | IS_MMAPPED, size being the request plus those 16 bytes
rounded up to pages (sysmalloc_mmap in malloc/malloc.c); the caller's pointer comes right after.
The kernel merges neighbouring mappings, so one mapping can hold several blocks in a row. A block
that fits a hole in the heap still goes there, hence :func:`fresh`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_HEADER = 16
_FLAGS, _IS_MMAPPED = 7, 2
_MOST_HOLES = 1 << 14


def find(nbytes: int) -> list[int]:
    """Addresses of blocks of ``nbytes`` (equal when rounded to pages) in mappings of their own.

    Empty where /proc does not tell or another allocator is in use. Never raises.
    """
    wanted = _to_pages(nbytes + _HEADER)
    try:
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            return [
                base + _HEADER
                for start, end in _anonymous()
                for base, size in _blocks(memory.fileno(), start, end)
                if size == wanted
            ]
    except OSError:
        return []


@contextlib.contextmanager
def fresh(nbytes: int) -> Iterator[list[int]]:
    """Addresses of the blocks of ``nbytes`` that the body allocates; complete once it has ended.

    Stays empty unless the process was started with MALLOC_MMAP_THRESHOLD_ at most ``nbytes``.
    While the body runs the heap's holes of that size are held, untouched.
    """
    blocks: list[int] = []
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    if not threshold.isdigit() or not 0 < int(threshold) <= nbytes:
        yield blocks
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    holes: list[int] = []
    try:
        while len(holes) < _MOST_HOLES and (block := libc.malloc(nbytes)):
            holes.append(block)
            if _is_block(ctypes.string_at(block - _HEADER, _HEADER)):
                break
        before = set(find(nbytes))
        yield blocks
        blocks += [block for block in find(nbytes) if block not in before]
    finally:
        for block in holes:
            libc.free(block)


def written(blocks: Sequence[int], nbytes: int, step: Callable[[], object]) -> list[int]:
    """Those of the blocks, each of ``nbytes``, whose content ``step`` changes."""
    before = [zlib.crc32(ctypes.string_at(block, nbytes)) for block in blocks]
    step()
    after = [zlib.crc32(ctypes.string_at(block, nbytes)) for block in blocks]
    return [block for block, b, a in zip(blocks, before, after, strict=True) if a != b]


def _blocks(memory: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """(base, size) of the blocks in one mapping; what is no block is passed page by page."""
    base = start
    while base < end:
        try:
            header = os.pread(memory, _HEADER, base)
        except OSError:  # unmapped meanwhile
            return
        size = _is_block(header)
        if 0 < size <= end - base:
            yield base, size
            base += size
        else:
            base += mmap.PAGESIZE


def _is_block(header: bytes) -> int:
    """Size of the mapping that a block's header describes; 0 when it is no such header."""
    if len(header) < _HEADER:
        return 0
    previous, size = struct.unpack("<QQ", header)
    mapped = previous == 0 and size & _FLAGS == _IS_MMAPPED
    size -= _IS_MMAPPED
    return size if mapped and size == _to_pages(size) else 0


def _anonymous() -> list[tuple[int, int]]:
    """(start, end) of private, writable mappings without a file or a name."""
    spans = []
    for line in Path("/proc/self/maps").read_text("ascii", "replace").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 5 and words[1] == "rw-p" and words[4] == "0":
            low, high = words[0].split("-")
            spans.append((int(low, 16), int(high, 16)))
    return spans


def _to_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
