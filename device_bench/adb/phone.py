"""What a phone is and how it fares, a script each. Anything it does not tell is None."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import re
from collections.abc import Mapping

from device_bench.adb.client import Adb
from device_bench.conditions import Conditions, Device

ROOT = "/data/local/tmp/edgeqkv"  # the only place on a device that is ever written to
_FIXED = {
    "model": "getprop ro.product.model",
    "soc": "getprop ro.soc.model",
    "platform": "getprop ro.board.platform",
    "abi": "getprop ro.product.cpu.abi",
    "release": "getprop ro.build.version.release",
    "qemu": "getprop ro.kernel.qemu",
    "boot_qemu": "getprop ro.boot.qemu",
    "hardware": "getprop ro.hardware",
    "cpuinfo": "cat /proc/cpuinfo",
    "arch": "cat /proc/sys/kernel/arch",
    "huge": "cat /sys/kernel/mm/transparent_hugepage/enabled",
    "machine": "uname -m",
    "kernel": "uname -r",
    "page": "getconf PAGE_SIZE || getconf PAGESIZE",
    "interpreters": "ls /proc/sys/fs/binfmt_misc",
}
# Asked again before and after every run.
_CHANGING = {
    "meminfo": "cat /proc/meminfo",
    "loadavg": "cat /proc/loadavg",
    "governor": "cat /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "frequency": "cat /sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq",
    "free": "df -k /data/local/tmp",
    "battery": "dumpsys battery",
    "thermal": "dumpsys thermalservice",
}
_VIRTUAL_HARDWARE = ("goldfish", "ranchu", "cutf", "vsoc")
_MARK = "@edgeqkv@"
# PowerManager's and ThermalManager's words for Thermal Status 0 to 6.
THERMAL = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")


@dataclasses.dataclass(frozen=True)
class Phone:
    """battery_percent 0 to 100; temperature_c: the hottest CPU sensor, else the battery's;
    thermal_status: Android's word for how much it throttles. Bytes otherwise."""

    serial: str
    model: str | None
    soc: str | None
    abi: str | None
    android: str | None
    machine: str | None
    kernel: str | None
    memory_bytes: int | None
    available_bytes: int | None
    free_bytes: int | None
    page_size: int | None
    cpu_count: int | None
    cpu_model: str | None
    features: tuple[str, ...] | None
    battery_percent: int | None
    power: str | None
    temperature_c: float | None
    thermal_status: str | None
    emulated: bool
    governor: str | None
    frequency_khz: int | None
    load_average_1m: float | None
    huge_pages: str | None


def script_of(questions: Mapping[str, str]) -> str:
    """For a phone's sh: every answer after a line that names it."""
    asked = [f"say {name}; ( {command} ) 2>/dev/null" for name, command in questions.items()]
    return "\n".join(["cd /; export LC_ALL=C", f'say() {{ echo; echo "{_MARK} $1"; }}', *asked])


def fixed_facts(adb: Adb) -> str:
    """What cannot change while the phone is attached, for :func:`read_phone`. Raises DeviceLost."""
    return adb.shell(script_of(_FIXED)).out


def read_phone(adb: Adb, fixed: str | None = None) -> Phone:
    """fixed: what :func:`fixed_facts` said, asked now where it is None. Raises DeviceLost."""
    text = fixed_facts(adb) if fixed is None else fixed
    return parse(adb.serial, f"{text}\n{adb.shell(script_of(_CHANGING)).out}")


def parse(serial: str, text: str) -> Phone:
    """``text``: what the scripts of :func:`read_phone` printed."""
    parts = re.split(rf"(?m)^{_MARK} (\w+)\n", text.replace("\r\n", "\n"))
    said = {k: v.strip() for k, v in zip(parts[1::2], parts[2::2], strict=True)}
    get = {k: v or None for k, v in said.items()}.get
    cpuinfo, huge = get("cpuinfo") or "", get("huge")
    features = _field(cpuinfo, "Features")
    load = get("loadavg")
    return Phone(
        serial=serial,
        model=get("model"),
        soc=get("soc") or get("platform"),
        abi=get("abi"),
        android=get("release"),
        machine=get("machine"),
        kernel=get("kernel"),
        memory_bytes=_kib(get("meminfo"), "MemTotal"),
        available_bytes=_kib(get("meminfo"), "MemAvailable"),
        free_bytes=_free(get("free")),
        page_size=_int(get("page")),
        cpu_count=len(re.findall(r"(?m)^processor\s*:", cpuinfo)) or None,
        cpu_model=_field(cpuinfo, "Hardware") or _part(cpuinfo),
        features=tuple(features.split()) if features else None,
        battery_percent=_int(_field(get("battery") or "", "level")),
        power=_power(get("battery")),
        temperature_c=_temperature(get("thermal"), get("battery")),
        thermal_status=_thermal(get("thermal")),
        emulated=_emulated(said),
        governor=get("governor"),
        frequency_khz=_int(get("frequency")),
        load_average_1m=float(load.split()[0]) if load else None,
        huge_pages=huge[huge.find("[") + 1 : huge.find("]")] if huge and "[" in huge else huge,
    )


def device_of(phone: Phone) -> Device:
    """id: of a hash of the serial, which is the owner's business."""
    return Device(
        system="Android" if phone.android else "Linux",
        release=phone.kernel or "",
        machine=phone.machine or "",
        cpu_model=phone.cpu_model,
        cpu_count=phone.cpu_count,
        memory_bytes=phone.memory_bytes,
        kind="adb",
        emulated=phone.emulated,
        id=hashlib.sha256(phone.serial.encode()).hexdigest()[:8],
        model=phone.model,
        soc=phone.soc,
        abi=phone.abi,
        os_version=f"Android {phone.android}" if phone.android else None,
        features=phone.features,
    )


def conditions_of(phone: Phone, threads: int, cores: tuple[int, ...] | None) -> Conditions:
    return Conditions(
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu_model=phone.cpu_model,
        governor=phone.governor,
        frequency_khz=phone.frequency_khz,
        temperature_c=phone.temperature_c,
        load_average_1m=phone.load_average_1m,
        threads=threads,
        affinity=cores,
        page_size=phone.page_size,
        huge_pages=phone.huge_pages,
        python=None,
        engine="native",
        power=phone.power,
    )


def _emulated(said: dict[str, str]) -> bool:
    """By Android's own properties, or by a kernel that is of another machine than it says."""
    arch, machine = said.get("arch"), said.get("machine")
    other = bool(arch and machine and arch != machine)
    interpreted = any(n.startswith("qemu-") for n in said.get("interpreters", "").split())
    virtual = said.get("hardware", "").startswith(_VIRTUAL_HARDWARE)
    return other or interpreted or virtual or "1" in (said.get("qemu"), said.get("boot_qemu"))


def _field(text: str, name: str) -> str | None:
    """Value of the first ``name : value`` line."""
    found = re.search(rf"(?mi)^[ \t]*{re.escape(name)}[ \t]*:[ \t]*(\S.*)$", text)
    return found[1].strip() if found else None


def _part(cpuinfo: str) -> str | None:
    """ARM kernels name cores by numbers: implementer and part of each kind, in order."""
    parts = dict.fromkeys(re.findall(r"(?m)^CPU part\s*:\s*(\S+)", cpuinfo))
    maker = _field(cpuinfo, "CPU implementer")
    return f"implementer {maker}, parts {', '.join(parts)}" if maker and parts else None


def _int(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,12}", text) else None


def _kib(text: str | None, name: str) -> int | None:
    value = _field(text or "", name)
    kib = _int(value.split()[0]) if value else None
    return None if kib is None else kib * 1024


def _free(df: str | None) -> int | None:
    """Available of the last line, which toybox and busybox both end with: free, use %, mount."""
    words = df.split() if df else []
    kib = _int(words[-3]) if len(words) >= 3 else None
    return None if kib is None else kib * 1024


def _power(battery: str | None) -> str | None:
    if battery is None:
        return None
    sources = re.findall(r"(?mi)^\s*\w+ powered:\s*(\w+)", battery)
    return ("mains" if "true" in sources else "battery") if sources else None


def _temperature(thermal: str | None, battery: str | None) -> float | None:
    """dumpsys thermalservice has Temperature{mValue=41.2, mType=0 (CPU) ...}; the battery is in 0.1 C."""
    found = re.findall(r"Temperature\{mValue=(-?[\d.]+), mType=(\d+)", thermal or "")
    cpu = [float(v) for v, kind in found if kind == "0" and float(v) > 0]
    if cpu:
        return max(cpu)
    tenths = _int(_field(battery or "", "temperature"))
    return None if tenths is None else tenths / 10


def _thermal(text: str | None) -> str | None:
    status = _int(_field(text or "", "Thermal Status"))
    return THERMAL[status] if status is not None and status < len(THERMAL) else None
