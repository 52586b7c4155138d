"""The first start after a reboot, or after other programs needed the memory: files read from the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

supported = hasattr(os, "posix_fadvise")


def evict(files: Sequence[Path]) -> bool:
    """Drop the files' pages from the system's page cache; False where any stays, as on tmpfs."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # a page that still has to be written is kept
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    return not any(cached_pages(path) for path in files)


def cached_pages(path: Path) -> int:
    """Pages of the file that are in memory, by mincore(2)."""
    size = path.stat().st_size
    if not size:
        return 0
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        if mincore(start, size, found.ctypes.data):
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return int((found & 1).sum())
