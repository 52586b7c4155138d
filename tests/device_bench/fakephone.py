"""The fake phone: a real adb and adbd, an arm64 userland under qemu. tests/phone/ makes and boots it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from device_bench.devices.qemu import CPUS, cpuinfo

SCRIPTS = Path(__file__).parents[1] / "phone"
ROOT = Path(os.environ.get("EDGEQKV_FAKE_PHONE", "/var/tmp/edgeqkv-fake-phone"))
SERIAL = "127.0.0.1:5600"
_TOOLS = ("adb", "unshare", "ip", "qemu-aarch64-static", "aarch64-linux-gnu-gcc", "readelf")


def skip_unless_possible() -> None:
    """Skip with the reason where the fake phone cannot run."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"the fake phone needs {', '.join(missing)}: tests/phone/install.sh")
    if not (ROOT / ".made").exists():
        pytest.skip(f"no fake phone at {ROOT}: tests/phone/make.sh {ROOT}")
    mount = "mount -t binfmt_misc none /proc/sys/fs/binfmt_misc"
    done = subprocess.run(
        ["unshare", "-Urmnpf", "sh", "-c", mount], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no private binfmt_misc here: {done.stderr.strip()}")


class FakePhone:
    def __init__(self, process: subprocess.Popen[str], socket: Path) -> None:
        self._process = process
        self.env = {"ADB_SERVER_SOCKET": f"localfilesystem:{socket}"}

    @property
    def pid(self) -> int:
        """A process in the phone's network, for nsenter."""
        return self._process.pid

    def _order(self, word: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def unplug(self) -> None:
        self._order("unplug")

    def plug(self) -> None:
        self._order("plug")

    def shell(self, script: str) -> str:
        return subprocess.run(
            ["adb", "-s", SERIAL, "shell", script],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        ).stdout


@contextlib.contextmanager
def booted(cpu: str = "max", size: str = "256m") -> Iterator[FakePhone]:
    with tempfile.TemporaryDirectory(prefix="edgeqkv-phone-") as folder:
        socket = Path(folder, "adb.sock")
        info = Path(folder, "cpuinfo")
        info.write_text(cpuinfo(CPUS[cpu]), "utf-8")
        process = subprocess.Popen(
            ["unshare", "-Urmnpf", "--kill-child", "--", SCRIPTS / "boot.sh", ROOT, socket, size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "QEMU_CPU": CPUS[cpu].option, "CPUINFO": str(info)},
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "booted\n", line
            yield FakePhone(process, socket)
        finally:
            process.kill()
            process.wait()
