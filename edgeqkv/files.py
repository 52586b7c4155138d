"""Write a folder or a file whole or not at all. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgeqkv.errors import UsageError
from edgeqkv.interrupts import heard


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Fail before any work is done, not after it.

    Raises:
        UsageError: ``target`` exists and ``overwrite`` is false, is no folder or cannot be made.
    """
    for path in (target, *target.parents):
        if path.is_symlink() and not path.exists():
            raise UsageError(f"{path} is a link that leads nowhere; choose another output")
        if path.exists():
            if not path.is_dir():
                raise UsageError(f"{path} is a file; the output is a folder, choose another name")
            break
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; choose another output or give --overwrite")
    if overwrite and any(p.is_relative_to(target.resolve()) for p in (Path.cwd(), Path.home())):
        raise UsageError(f"{target} holds where you are or your home; choose another output")
    check_writable(target)


def check_writable(target: Path) -> None:
    """Make a folder where ``target`` will be, and remove it: permissions do not tell all.

    Raises:
        UsageError: none can be made there.
    """
    there = next(p for p in Path(os.path.abspath(target)).parents if p.exists())  # noqa: PTH100
    try:
        Path(tempfile.mkdtemp(prefix=".edgeqkv.", dir=there)).rmdir()
    except OSError as e:  # /proc says that there is no such file
        why = "it takes no folders" if e.errno == errno.ENOENT else str(e.strerror).lower()
        raise UsageError(f"{target} cannot be made in {there}: {why}; choose another") from None


@contextlib.contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of ``target``; rename it into place only if the block succeeds.

    A failure or a kill never leaves a half-written ``target``; what a killed process left beside
    it is removed by the next call. Folders above it that were made for it go with it.

    Raises:
        UsageError: as :func:`refuse_existing`.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100  (resolve() would follow a link)
    refuse_existing(target, overwrite)
    with _parents(target):
        _remove_abandoned(target)
        prefix = f".{target.name}.{os.getpid()}."
        temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=target.parent))
        try:
            with _noted_interrupts() as interrupted:
                yield temporary
            if interrupted:
                raise KeyboardInterrupt
            _readable(temporary)
            if target.exists():
                old = Path(tempfile.mkdtemp(prefix=prefix, suffix=".old.tmp", dir=target.parent))
                target.rename(old / target.name)
                temporary.rename(target)
                shutil.rmtree(old)
            else:
                temporary.rename(target)
        except BaseException as e:
            shutil.rmtree(temporary, ignore_errors=True)
            if (
                isinstance(e, OSError) and e.filename is None
            ):  # a write on a full disk names no file
                e.filename = str(target)
            raise


@contextlib.contextmanager
def _parents(target: Path) -> Iterator[None]:
    """Make the folders above ``target``; of those, a failure leaves none that is empty."""
    made = [p for p in target.parents if not p.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first that holds something ends it
            for folder in made:
                folder.rmdir()
        raise


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Fill the yielded list on Ctrl-C, which SDKs may swallow: it is an exception like any other.

    So with SIGTERM, where the command line raises there too.
    """
    noted: list[int] = []

    def hear(number: int, usual: Callable[[], Any]) -> None:
        try:
            usual()
        except BaseException:
            noted.append(number)
            raise

    with heard(hear):
        yield noted


def _readable(folder: Path) -> None:
    """Usual permissions: mkdtemp and some writers (safetensors) keep what they make to the owner."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            may_run = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod((0o777 if may_run else 0o666) & ~mask)


def _remove_abandoned(target: Path) -> None:
    """Delete temporary siblings whose process no longer exists (it was killed)."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d+)\..*\.tmp")
    for sibling in target.parent.iterdir():
        match = pattern.fullmatch(sibling.name)
        if match and not _is_running(int(match[1])):
            shutil.rmtree(sibling, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
