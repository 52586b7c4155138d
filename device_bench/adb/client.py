"""Call the ``adb`` program. Arguments are lists, scripts for the phone are quoted word by word."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from device_bench.devices import DeviceLost
from edgeqkv.errors import EdgeQKVError, MissingDependencyError, UsageError

# What adb prints of a serial; a network address and mDNS names are such too. Never starts with "-".
_SERIAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:%\[\]-]{0,127}")
_STATES = {
    "unauthorized": "unlock it and allow USB debugging from this computer",
    "authorizing": "unlock it and allow USB debugging from this computer",
    "offline": "unplug it and plug it in again, or wait until it has booted",
    "no permissions": "this user may not open the USB device; see Android's udev rules",
    "bootloader": "it is in the bootloader; start Android",
    "recovery": "it is in recovery mode; start Android",
    "sideload": "it is in sideload mode; start Android",
}
# What a client says of a device that has gone, whatever command it was running.
_GONE = re.compile(
    r"device .*not found|no devices|device offline|unauthorized|error: closed|protocol fault|"
    r"device still (?:auth|conn)|connection reset|failed to (?:read|get) .*(?:status|transport)",
    re.IGNORECASE,
)
QUICK_S = 30.0


@dataclasses.dataclass(frozen=True)
class Listed:
    """A line of ``adb devices``. state: ``device`` when it can be used."""

    serial: str
    state: str


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str


def find_adb() -> str:
    """$ADB, the adb of PATH, or the one that the PyPI package adbutils brings.

    Raises:
        MissingDependencyError: none of them is there.
    """
    named = os.environ.get("ADB")
    found = shutil.which(named or "adb")
    if found:
        return found
    if named is None and importlib.util.find_spec("adbutils"):
        from adbutils import adb_path

        return str(adb_path())
    asked = f"$ADB is {named!r}, which is no program" if named else "adb was not found"
    raise MissingDependencyError(f"{asked}; apt-get install adb, or pip install adbutils")


def check_serial(serial: str) -> str:
    """The serial itself; UsageError for what cannot be one."""
    if not _SERIAL.fullmatch(serial):
        raise UsageError(f"{serial[:60]!r} is no device serial; `edgeqkv devices` lists them")
    return serial


def listed() -> list[Listed]:
    """Every device that adb knows, usable or not."""
    done = subprocess.run(
        [find_adb(), "devices"], capture_output=True, text=True, check=False, timeout=QUICK_S
    )
    if done.returncode:
        raise EdgeQKVError(f"adb does not start: {_line(done.stderr)}")
    rows = (line.split("\t", 1) for line in done.stdout.splitlines()[1:] if "\t" in line)
    found = [Listed(serial, state.strip()) for serial, state in rows]
    return [d for d in found if _SERIAL.fullmatch(d.serial)]


def what_to_do(state: str) -> str:
    """Advice for a device that is not in the state ``device``."""
    known = next((text for key, text in _STATES.items() if state.startswith(key)), None)
    return known or "it must be in the state 'device'"


class Adb:
    """One device."""

    def __init__(self, serial: str) -> None:
        self.serial = check_serial(serial)
        self._adb = find_adb()

    def shell(self, script: str, *, timeout_s: float = QUICK_S) -> Answer:
        """Run ``script`` with the phone's sh. Its exit status is the phone's.

        Raises:
            DeviceLost: the device has gone, or does not answer in time.
        """
        return self._run(["shell", script], timeout_s)

    def push(self, local: Path, remote: str, *, timeout_s: float = 600) -> None:
        """Raises DeviceLost; EdgeQKVError for a full or read-only device."""
        done = self._run(["push", str(local), remote], timeout_s)
        if done.status:
            said = done.err + done.out
            if "No space left" in said:
                raise EdgeQKVError(
                    f"{self.serial} is full: {local.name} did not fit; free some space"
                )
            raise EdgeQKVError(f"{self.serial}: {local.name} could not be copied: {_line(said)}")

    def pull(self, remote: str, local: Path) -> bool:
        """False where there is no such file."""
        return self._run(["pull", remote, str(local)], QUICK_S).status == 0

    def stream(
        self, script: str, each_line: Callable[[str], None], *, timeout_s: float | None
    ) -> tuple[int, str, bool]:
        """(exit status, last line, whether it ran out of time) of a long script.

        Both streams of the phone's process are handed to ``each_line`` as they come.
        """
        process = subprocess.Popen(
            [self._adb, "-s", self.serial, "shell", f"{{ {script}\n}} 2>&1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout_s or 0, give_up)
        if timeout_s is not None:
            timer.start()
        last = ""
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip() or last
                each_line(line.strip())
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        return status, last, late.is_set()

    def state(self) -> str:
        """What ``adb devices`` says of it; ``gone`` when it is not there."""
        return next((d.state for d in listed() if d.serial == self.serial), "gone")

    def check_there(self) -> None:
        """Raise DeviceLost unless the device can be used."""
        state = self.state()
        if state == "gone":
            raise DeviceLost(f"{self.serial} is gone (unplugged or rebooting); connect it again")
        if state != "device":
            raise DeviceLost(f"{self.serial} is {state}: {what_to_do(state)}")

    def _run(self, arguments: Sequence[str], timeout_s: float) -> Answer:
        try:
            done = subprocess.run(
                [self._adb, "-s", self.serial, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            self.check_there()
            raise DeviceLost(f"{self.serial} does not answer after {timeout_s:g} s") from None
        out, err = (b.decode("utf-8", "replace") for b in (done.stdout, done.stderr))
        if done.returncode and _GONE.search(err + out):
            self.check_there()
            raise DeviceLost(f"{self.serial}: {_line(err + out)}")
        return Answer(done.returncode, out, err)


def _line(text: str) -> str:
    """The line that says most: adb's own error, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), (lines or ["no message"])[-1])[
        :200
    ]
