"""A folder that all processes of one test run share: what one has lowered, the others only read."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NAME = "EDGEQKV_TEST_FOLDER"


def make() -> None:
    """Called by the process that starts the others, which inherit the variable."""
    if _NAME not in os.environ:
        os.environ[_NAME] = tempfile.mkdtemp(prefix="edgeqkv-tests-")
        atexit.register(shutil.rmtree, os.environ[_NAME], ignore_errors=True)


@contextlib.contextmanager
def made_once(name: str) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it has to be filled); other processes that want it wait until it is."""
    root = Path(os.environ[_NAME])
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = root / name
        try:
            yield folder, not folder.exists()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
