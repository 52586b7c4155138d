"""Copies of files on a phone: pushed only where the phone's own sha256 differs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from device_bench.adb.client import Adb
from device_bench.adb.phone import ROOT, Phone
from edgeqkv.artifact import FileEntry, inside
from edgeqkv.console import human_bytes, note
from edgeqkv.errors import EdgeQKVError, UnsupportedError

# Names that mean the same to every shell and file system on the way.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*(?:/[A-Za-z0-9_][A-Za-z0-9._+-]*)*")
SPARE_BYTES = 16 << 20  # left free on the phone, for the job's own files


def sync(adb: Adb, phone: Phone, source: Path, files: Mapping[str, FileEntry], target: str) -> None:
    """Make ``ROOT/target`` hold ``files`` of ``source``; what a broken push left is replaced.

    Raises:
        DeviceLost. UnsupportedError: a file name that is not plain. EdgeQKVError: no space, or the
        copy is not what was sent.
    """
    for name in files:
        if not _NAME.fullmatch(name):
            raise UnsupportedError(f"{source}: {name!r} cannot be copied to a phone; rename it")
    missing = _missing(adb, files, target)
    if not missing:
        return
    need = sum(files[name].nbytes for name in missing)
    if phone.free_bytes is not None and need + SPARE_BYTES > phone.free_bytes:
        raise EdgeQKVError(
            f"{adb.serial} has {human_bytes(phone.free_bytes)} free, {human_bytes(need)} are to be "
            f"copied and {human_bytes(SPARE_BYTES)} stay free; free some, or `edgeqkv device clean`"
        )
    count = f"{len(missing)} file{'s' * (len(missing) > 1)}"
    note(f"{adb.serial}: copying {count} of {source.name}, {human_bytes(need)}")
    folders = {f"{ROOT}/{target}/{name}".rpartition("/")[0] for name in missing}
    made = adb.shell("mkdir -p " + " ".join(map(shlex.quote, sorted(folders))))
    if made.status:
        raise EdgeQKVError(f"{adb.serial}: {ROOT} cannot be made: {made.err.strip()[:200]}")
    for name in missing:
        adb.push(inside(source, name), f"{ROOT}/{target}/{name}")
    if wrong := _missing(adb, files, target):
        raise EdgeQKVError(f"{adb.serial}: {wrong[0]} did not arrive whole; try again")


def _missing(adb: Adb, files: Mapping[str, FileEntry], target: str) -> list[str]:
    """Names that the phone lacks, or holds with other content."""
    names = " ".join(map(shlex.quote, files))
    script = f"cd {shlex.quote(f'{ROOT}/{target}')} 2>/dev/null && sha256sum {names} 2>/dev/null"
    held = {}
    for line in adb.shell(script, timeout_s=300).out.splitlines():
        digest, _, name = line.strip().partition(" ")
        held[name.strip(" *")] = digest
    return [name for name, entry in files.items() if held.get(name) != entry.sha256]


def remove(adb: Adb, target: str = "") -> None:
    """Delete ``ROOT/target``, or all of ROOT."""
    adb.shell(f"rm -rf {shlex.quote(f'{ROOT}/{target}'.rstrip('/'))}", timeout_s=120)
