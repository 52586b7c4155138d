"""adb without a phone: what a client says, what a phone tells, what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from device_bench.adb import store
from device_bench.adb.client import Adb, check_serial, listed
from device_bench.adb.phone import device_of, parse
from device_bench.devices import DeviceLost, open_transports
from device_bench.native.cross import abi_of
from edgeqkv.artifact import FileEntry
from edgeqkv.errors import EdgeQKVError, MissingDependencyError, UnsupportedError, UsageError

PIXEL = {
    "model": "Pixel 8",
    "soc": "Tensor G3",
    "abi": "arm64-v8a",
    "release": "15",
    "machine": "aarch64",
    "kernel": "5.15.137-android14-11",
    "page": "16384",
    "meminfo": "MemTotal:        7784500 kB\nMemFree:  100 kB\nMemAvailable:    3000000 kB",
    "cpuinfo": "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\n"
    "CPU part\t: 0xd46\n\nprocessor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd4e\n",
    "free": "Filesystem     1K-blocks     Used Available Use% Mounted on\n"
    "/dev/block/dm-52\n               112345678 45678901  66000000  41% /data/user/0",
    "battery": "Current Battery Service state:\n  AC powered: false\n  USB powered: false\n"
    "  level: 57\n  temperature: 312\n",
    "thermal": "Thermal Status: 2\nCurrent temperatures from HAL:\n"
    "\tTemperature{mValue=61.5, mType=0, mName=BIG, mStatus=2}\n"
    "\tTemperature{mValue=70.0, mType=1, mName=GPU, mStatus=0}\n",
    "loadavg": "3.10 2.90 2.50 2/1000 12345",
    "interpreters": "register\nstatus",
}


def told(**changes: str) -> str:
    return "".join(f"\n@edgeqkv@ {k}\n{v}\n" for k, v in {**PIXEL, **changes}.items())


def test_what_a_phone_tells():
    phone = parse("8A1X", told())
    assert (phone.model, phone.soc, phone.abi, phone.android) == (
        "Pixel 8",
        "Tensor G3",
        "arm64-v8a",
        "15",
    )
    assert (phone.page_size, phone.cpu_count, phone.battery_percent) == (16384, 2, 57)
    assert (phone.memory_bytes, phone.available_bytes) == (7784500 << 10, 3000000 << 10)
    assert phone.free_bytes == 66000000 << 10
    assert (phone.temperature_c, phone.thermal_status, phone.power) == (61.5, "moderate", "battery")
    assert phone.cpu_model == "implementer 0x41, parts 0xd46, 0xd4e"
    assert phone.load_average_1m == 3.1
    assert not phone.emulated
    device = device_of(phone)
    assert (device.kind, device.os_version, device.system) == ("adb", "Android 15", "Android")
    assert "8A1X" not in str(device)


def test_what_a_phone_does_not_tell_is_none():
    silent = parse("8A1X", "".join(f"\n@edgeqkv@ {k}\n\n" for k in PIXEL))
    known = {k for k, v in vars(silent).items() if v not in (None, False)}
    assert known == {"serial"}
    assert parse("8A1X", told(thermal="")).temperature_c == 31.2
    assert parse("8A1X", told(thermal="Thermal Status: x", battery="?")).temperature_c is None


@pytest.mark.parametrize(
    "sign",
    [
        {"arch": "x86_64"},
        {"interpreters": "qemu-aarch64\nregister"},
        {"qemu": "1"},
        {"hardware": "ranchu"},
    ],
)
def test_an_emulated_phone_is_known(sign):
    assert parse("8A1X", told(**sign)).emulated


@pytest.mark.parametrize(
    "serial", ["-x", "", "a b", "a;reboot", "$(reboot)", "a\nb", "`id`", "../x", "x" * 200]
)
def test_a_serial_is_no_script(serial):
    with pytest.raises(UsageError, match="no device serial"):
        check_serial(serial)


@pytest.mark.parametrize(
    "name", ["a b.onnx", "$(reboot)", "a;b", "-rf", "../up", "x/../y", "a\nb", "/abs", "a'b", ".x"]
)
def test_a_file_name_is_no_script(name, tmp_path):
    files = {name: FileEntry("0" * 64, 1)}
    with pytest.raises(UnsupportedError, match="cannot be copied to a phone; rename it"):
        store.sync(None, parse("8A1X", told()), tmp_path, files, "bundle-x")


def test_abi():
    assert (abi_of("arm64-v8a"), abi_of("x86_64")) == ("arm64", "x86_64")
    with pytest.raises(UnsupportedError, match=r"no runner for ABI 'armeabi-v7a'; allowed: arm64"):
        abi_of("armeabi-v7a")


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """An adb that prints what a test wants: states that no emulated phone can be brought into."""

    def make(devices: str, then: str = "exit 1") -> None:
        path = tmp_path / "adb"
        lines = f"List of devices attached\n{devices}\n"
        (tmp_path / "list").write_text(lines)
        path.write_text(
            f'#!/bin/sh\nif [ "$1" = devices ]; then cat "{tmp_path}/list"; exit; fi\n{then}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("ADB", str(path))

    return make


def test_listed(stub):
    stub("8A1X\tdevice\nemulator-5554\toffline\n192.168.1.7:5555\tunauthorized\n$(id)\tdevice")
    assert [(d.serial, d.state) for d in listed()] == [
        ("8A1X", "device"),
        ("emulator-5554", "offline"),
        ("192.168.1.7:5555", "unauthorized"),
    ]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("unauthorized", "8A1X is unauthorized: unlock it and allow USB debugging"),
        ("offline", "8A1X is offline: unplug it and plug it in again"),
        ("no permissions (user in plugdev?)", "udev rules"),
        ("recovery", "start Android"),
    ],
)
def test_a_phone_that_cannot_be_used(stub, state, words):
    stub(f"8A1X\t{state}")
    for names in (["adb"], ["adb:8A1X"]):
        with pytest.raises(EdgeQKVError, match=words.replace("(", r"\(")):
            open_transports(names, None)


def test_no_phone(stub, cli, monkeypatch, tmp_path):
    stub("")
    with pytest.raises(EdgeQKVError, match="adb sees no device"):
        open_transports(["adb"], None)
    with pytest.raises(DeviceLost, match=r"8A1X is gone \(unplugged or rebooting\)"):
        open_transports(["adb:8A1X"], None)
    done = cli("devices", check=0)
    assert "adb sees no device" in done.stderr
    assert json.loads(cli("devices", "--json", check=0).stdout) == []
    monkeypatch.setenv("ADB", str(tmp_path / "none"))
    with pytest.raises(MissingDependencyError, match="which is no program"):
        listed()


def test_one_phone_named_twice_is_one(stub):
    answer = told().replace("'", "")
    stub("8A1X\tdevice\n9B2Y\tdevice", f"cat <<'X'\n{answer}\nX")
    assert len(open_transports(["adb", "adb:8A1X", "adb"], None)) == 2
    (one,) = open_transports(["adb:9B2Y"], None, cores=[4, 5])
    assert one.conditions(2).affinity == (4, 5)


def test_gone_while_it_answers(stub):
    stub("8A1X\tdevice", "echo \"error: device '8A1X' not found\" >&2; exit 1")
    with pytest.raises(DeviceLost, match="not found"):
        Adb("8A1X").shell("true")


def test_a_phone_that_hangs(stub):
    stub("8A1X\tdevice", "exec sleep 20")
    with pytest.raises(DeviceLost, match="does not answer"):
        Adb("8A1X").shell("true", timeout_s=0.5)


def test_usage(stub):
    stub("8A1X\tdevice")
    with pytest.raises(UsageError, match="allowed with --device adb: native"):
        open_transports(["adb:8A1X"], "python")
    with pytest.raises(UsageError, match="--device is 'adb:'"):
        open_transports(["adb:"], None)
    with pytest.raises(UsageError, match=r"--device is 'usb'; allowed: local, adb, browser"):
        open_transports(["usb"], None)


def test_the_phone_scripts_are_valid_shell():
    from device_bench.adb.phone import _CHANGING, _FIXED, script_of

    for questions in (_FIXED, _CHANGING):
        subprocess.run(["sh", "-n", "-c", script_of(questions)], check=True)
    for script in (Path(__file__).parents[1] / "phone").glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
