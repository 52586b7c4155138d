"""``--device qemu``: the phone's runner under user-mode emulation, without a phone."""

from __future__ import annotations

import json
import shutil

import pytest

from device_bench.devices.qemu import PROGRAMS
from device_bench.native.cross import TARGETS
from device_bench.result import BenchResult
from device_bench.self_test import write_bundle
from tests.device_bench.goldens import exported

QUICK = ("-p", "6", "-n", "2", "-r", "1", "--processes", "1", "--json")


@pytest.fixture(autouse=True)
def qemu():
    compiler = TARGETS["arm64"].compilers.c
    for what, names in (("qemu-aarch64", PROGRAMS), ("a compiler for arm64", compiler)):
        if not any(map(shutil.which, names)):
            pytest.skip(f"no {what} here")


def test_the_logits_are_right_and_no_speed_is_told(cli, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    bundle = exported(tmp_path / "b", "onnx", "q-mqa", weights="int4")
    out = tmp_path / "r.jsonl"
    cpus = ("cortex-a53", "cortex-a76")
    devices = [word for cpu in cpus for word in ("--device", f"qemu:{cpu}")]
    done = cli("bench", bundle, *QUICK, *devices, "-o", out, check=0)
    results = [BenchResult.from_dict(row) for row in json.loads(done.stdout)]
    assert {r.device.cpu_model for r in results} == set(cpus)
    for r in results:
        assert (r.status, r.reason, r.device.emulated, r.memory) == ("ok", None, True, None)
        assert r.samples.golden_max_abs > 0
    # A CPU with dot products of bytes rounds activations to bytes, the other keeps them in floats.
    worst = {r.device.cpu_model: r.samples.golden_max_abs for r in results}
    assert worst["cortex-a53"] < 1e-3 < worst["cortex-a76"]
    table = cli("compare", out, check=0).stdout
    assert "correctness" in table
    assert "emulated" in table


def test_another_cpu_is_one_line(cli, tmp_path):
    write_bundle(tmp_path / "b", "growing")
    done = cli("bench", tmp_path / "b", "--device", "qemu:m1", check=2)
    (line,) = done.stderr.splitlines()
    assert "qemu:m1; allowed CPUs: " in line
    assert "cortex-a53" in line
