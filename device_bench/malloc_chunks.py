"""Find one large malloc block in this process, so that memory which a runtime owns can be measured.

glibc gives a block of MALLOC_MMAP_THRESHOLD_ bytes or more a mapping of its own. It starts on a
page with the words prev_size = 0 and size | IS_MMAPPED, size being the request plus those 16 bytes
rounded up to pages (malloc/malloc.c: sysmalloc_mmap); the caller's pointer comes right after. The
kernel merges neighbouring mappings, so each page of a mapping is looked at.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_HEADER = 16
_IS_MMAPPED = 2


def find(nbytes: int, known: frozenset[int] = frozenset()) -> list[int]:
    """Addresses of blocks of exactly ``nbytes`` (to the page) in mappings of their own, without ``known``.

    Empty where /proc does not tell or another allocator is in use. Never raises.
    """
    page = mmap.PAGESIZE
    size = -(-(nbytes + _HEADER) // page) * page
    wanted = struct.pack("<QQ", 0, size | _IS_MMAPPED)
    found = []
    try:
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            for start, end in _anonymous():
                for base in range(start, end - size + 1, page):
                    if os.pread(memory.fileno(), _HEADER, base) == wanted:
                        found.append(base + _HEADER)
    except OSError:
        return []
    return [address for address in found if address not in known]


def _anonymous() -> list[tuple[int, int]]:
    """(start, end) of private, writable mappings without a file or a name."""
    spans = []
    for line in Path("/proc/self/maps").read_text("ascii", "replace").splitlines():
        words = line.split(maxsplit=5)
        if words[1] == "rw-p" and words[4] == "0" and len(words) == 5:
            low, high = words[0].split("-")
            spans.append((int(low, 16), int(high, 16)))
    return spans
