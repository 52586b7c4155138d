"""The machine, and the state it was in: what has to be the same before two runs may be compared."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu/cpu0/cpufreq")


@dataclasses.dataclass(frozen=True)
class Device:
    """What the machine is; no host name. kind: how it is reached, as --device says. emulated: its
    figures prove correctness and nothing else. id: tells two devices of one model apart, from a
    hash. model, soc, abi, os_version: as a phone names itself."""

    system: str
    release: str
    machine: str
    cpu_model: str | None
    cpu_count: int | None
    memory_bytes: int | None
    kind: str = "local"
    emulated: bool = False
    id: str | None = None
    model: str | None = None
    soc: str | None = None
    abi: str | None = None
    os_version: str | None = None


@dataclasses.dataclass(frozen=True)
class Conditions:
    """State right before the configuration ran. started_at: UTC. load_average_1m: runnable
    processes. huge_pages: policy for transparent huge pages (memory passes turn them off).
    engine: what drives the runtime, as --engine says; python is null where it is not Python."""

    started_at: str
    cpu_model: str | None
    governor: str | None
    frequency_khz: int | None
    temperature_c: float | None
    load_average_1m: float | None
    threads: int
    affinity: tuple[int, ...] | None
    page_size: int | None
    huge_pages: str | None
    python: str | None
    engine: str = "python"


def device() -> Device:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        memory = None
    return Device(
        system=platform.system(),
        release=platform.release(),
        machine=platform.machine(),
        cpu_model=cpu_model(),
        cpu_count=os.cpu_count(),
        memory_bytes=memory,
    )


def conditions(threads: int) -> Conditions:
    temperature = _number(Path("/sys/class/thermal/thermal_zone0/temp"))
    huge = _text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return Conditions(
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu_model=cpu_model(),
        governor=_text(_CPU / "scaling_governor"),
        frequency_khz=_number(_CPU / "scaling_cur_freq"),
        temperature_c=None if temperature is None else temperature / 1000,
        load_average_1m=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        threads=threads,
        affinity=(
            tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
        ),
        page_size=os.sysconf("SC_PAGE_SIZE"),
        huge_pages=huge[huge.find("[") + 1 : huge.find("]")] if huge and "[" in huge else huge,
        python=platform.python_version(),
    )


def cpu_model() -> str | None:
    """x86 says "model name"; ARM kernels at most "Hardware"."""
    info = _text(Path("/proc/cpuinfo")) or ""
    for key in ("model name", "Hardware", "cpu model"):
        for line in info.splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text and text.lstrip("-").isdigit() else None
