"""The machine, and the state it was in: what has to be the same before two runs may be compared."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu/cpu0/cpufreq")
_THERMAL = Path("/sys/class/thermal")
_CPU_ZONES = ("cpu", "x86_pkg", "soc", "tsens", "big", "little")
# What decides how fast a kernel can be, among the hundred flags of a CPU.
_FEATURES = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni"),
    *("avx512_bf16", "amx_int8", "amx_bf16", "neon", "asimd", "asimdhp", "asimddp"),
    *("fphp", "i8mm", "bf16", "sve", "sve2", "sme"),
)


@dataclasses.dataclass(frozen=True)
class Device:
    """What the machine is; no host name. kind: how it is reached, as --device says. emulated: its
    figures prove correctness and nothing else. id: tells two devices of one model apart, from a
    hash. model, soc, abi, os_version: as a phone names itself. features: of the CPU, those that
    kernels choose by."""

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
    features: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """How fast n_threads read a working set of nbytes together, over and over (bandwidth.py)."""

    n_threads: int
    nbytes: int
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Conditions:
    """State right before the configuration ran. started_at: UTC. load_average_1m: runnable
    processes. huge_pages: policy for transparent huge pages (memory passes turn them off).
    engine: what drives the runtime, as --engine says; python is null where it is not Python.
    power: mains or battery. temperature_after_c: right after. attempts: runs of this process, of
    which the last counts; max_cv (a share) and max_temp_c: the limits for which it was run again.
    read_bandwidth: of the device, measured once for the sweep."""

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
    power: str | None = None
    temperature_after_c: float | None = None
    attempts: int = 1
    max_cv: float | None = None
    max_temp_c: float | None = None
    read_bandwidth: tuple[Bandwidth, ...] | None = None


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
        features=_features(),
    )


def conditions(threads: int) -> Conditions:
    huge = _text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return Conditions(
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu_model=cpu_model(),
        governor=_text(_CPU / "scaling_governor"),
        frequency_khz=_number(_CPU / "scaling_cur_freq"),
        temperature_c=temperature_c(),
        load_average_1m=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        threads=threads,
        affinity=(
            tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
        ),
        page_size=os.sysconf("SC_PAGE_SIZE"),
        huge_pages=huge[huge.find("[") + 1 : huge.find("]")] if huge and "[" in huge else huge,
        python=platform.python_version(),
        power=_power(),
    )


def temperature_c() -> float | None:
    """The hottest thermal zone of the CPU, or of all zones where none says that it is the CPU's."""
    found = {}
    for zone in sorted(_THERMAL.glob("thermal_zone*")):
        value = _number(zone / "temp")
        if value is not None:
            found[f"{(_text(zone / 'type') or '').lower()} {zone.name}"] = value / 1000
    of_cpu = [t for name, t in found.items() if any(z in name for z in _CPU_ZONES)]
    return max(of_cpu or found.values(), default=None)


def _power() -> str | None:
    import psutil

    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError):  # no such call on this system, or a container that hides it
        return None
    return None if battery is None else "mains" if battery.power_plugged else "battery"


def _features() -> tuple[str, ...] | None:
    """x86 calls them "flags", ARM "Features"."""
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            return tuple(f for f in _FEATURES if f in flags)
    return None


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
