"""An ARM64 CPU without a phone: the phone's runner folder under qemu's user-mode emulation, here.

``qemu`` or ``qemu:CPU``: another CPU, other kernels. It shows that a bundle's numbers are right there,
and nothing of its speed.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_bench import conditions
from device_bench.devices import Transport
from device_bench.native.build import PROGRAM
from device_bench.native.cross import TARGETS, build_folder
from device_bench.native.run import run_here
from edgeqkv.errors import MissingDependencyError, UsageError

ABI = "arm64"
PROGRAMS = ("qemu-aarch64-static", "qemu-aarch64")


@dataclasses.dataclass(frozen=True)
class Cpu:
    """option: qemu's -cpu. The rest is what /proc/cpuinfo says of it, by which runtimes choose kernels
    too; features as qemu reports them in AT_HWCAP."""

    option: str
    implementer: str
    variant: str
    part: str
    features: str


_BASE = "fp asimd aes pmull sha1 sha2 crc32 cpuid"
_V8_2 = f"{_BASE} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"
# No dot products of bytes; those; those and matrix products of bytes. max: all that qemu has but
# scalable vectors.
CPUS = {
    "max": Cpu(
        *("max,sve=off,sme=off", "0x00", "0x0", "0x051"),
        f"{_V8_2} jscvt fcma sha3 sm3 sm4 sha512 asimdfhm ilrcpc flagm sb paca pacg dcpodp flagm2 frint "
        "i8mm bf16 rng bti mte",
    ),
    "cortex-a53": Cpu("cortex-a53", "0x41", "0x0", "0xd03", _BASE),
    "cortex-a76": Cpu("cortex-a76", "0x41", "0x4", "0xd0b", _V8_2),
}


def open_devices(argument: str | None, engine: str | None) -> Sequence[Transport]:
    """Raises UsageError for a CPU or engine that it has not, MissingDependencyError without qemu."""
    if engine not in (None, "native"):
        raise UsageError(f"--engine is {engine!r}; allowed with --device qemu: native")
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        raise MissingDependencyError("--device qemu needs qemu-aarch64; apt-get install qemu-user")
    cpu = argument or "max"
    if cpu not in CPUS:
        raise UsageError(f"--device is qemu:{cpu}; allowed CPUs: {', '.join(CPUS)}")
    return [Qemu(program, cpu)]


def cpuinfo(cpu: Cpu) -> str:
    """What /proc/cpuinfo says on a machine of such CPUs."""
    lines = {
        "Features": cpu.features,
        "CPU implementer": cpu.implementer,
        "CPU architecture": "8",
        "CPU variant": cpu.variant,
        "CPU part": cpu.part,
        "CPU revision": "1",
    }
    each = "".join(f"{key}\t: {value}\n" for key, value in lines.items())
    return "".join(f"processor\t: {i}\n{each}\n" for i in range(os.cpu_count() or 1))


class Qemu:
    """See ``device_bench.devices.Transport``."""

    engine = "native"
    no_memory: str | None = "emulated: the memory is the emulator's too, not the runtime's alone"

    def __init__(self, program: str, cpu: str) -> None:
        self._cpu = cpu
        # Files here hide the machine's own: qemu before 8 shows programs the host's /proc/cpuinfo, at
        # which ONNX Runtime crashes.
        self._root = tempfile.TemporaryDirectory(prefix="edgeqkv-qemu-")
        folder = Path(self._root.name, "proc")
        folder.mkdir()
        (folder / "cpuinfo").write_text(cpuinfo(CPUS[cpu]), "utf-8")
        self._start = [program, "-cpu", CPUS[cpu].option, "-L", self._root.name]

    def describe(self) -> conditions.Device:
        return conditions.Device(
            system="Linux",
            release=platform.release(),
            machine="aarch64",
            cpu_model=self._cpu,
            cpu_count=os.cpu_count(),
            memory_bytes=None,
            kind="qemu",
            emulated=True,
            id=self._cpu,
            abi=TARGETS[ABI].android,
        )

    def conditions(self, threads: int) -> conditions.Conditions:
        now = conditions.conditions(threads)
        return dataclasses.replace(now, cpu_model=self._cpu, python=None, engine=self.engine)

    def run(self, job: Mapping[str, Any], timeout_s: float | None) -> Any:
        return run_here(job, timeout_s, self._command)

    def _command(self, backend: str) -> tuple[list[str], str]:
        runner = build_folder(ABI, backend)
        libraries = runner.path / "lib"
        loader = [str(libraries / runner.loader), "--library-path", str(libraries)]
        library = str(libraries / runner.library) if runner.library else ""
        return [*self._start, *loader, str(runner.path / "bin" / PROGRAM)], library

    def close(self) -> None:
        self._root.cleanup()
