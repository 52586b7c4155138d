"""The whole way to a phone: real adb, real adbd, an arm64 userland under qemu."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import numpy as np

from device_bench.adb import store
from device_bench.adb.client import Adb
from device_bench.adb.phone import ROOT, read_phone
from device_bench.adb.transport import AdbDevice
from device_bench.jobs import JobFailed
from device_bench.native.cross import build_folder
from device_bench.result import BenchResult, read_results
from device_bench.workload import Workload
from edgeqkv.errors import EdgeQKVError
from tests.device_bench import fakephone
from tests.device_bench.fakephone import SERIAL
from tests.device_bench.goldens import golden_bundle, set_golden

QUICK = ("-p", "6", "-n", "0", "-r", "1", "--processes", "1", "--seed", "1", "--device", "adb")


@pytest.fixture(scope="module", autouse=True)
def possible():
    fakephone.skip_unless_possible()


@pytest.fixture(scope="module")
def phone(possible):
    with fakephone.booted() as booted:
        yield booted


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phone") / "b"
    return golden_bundle(folder, "q-mqa", "shared", "gemm")


def bench(cli, phone, bundle, *more, check=0):
    usual = zip(QUICK[::2], QUICK[1::2], strict=True)
    quick = [word for pair in usual if pair[0] not in more for word in pair]
    return cli("bench", bundle, *quick, *more, env=phone.env, check=check)


def pushed(cli, phone, bundle):
    """See to it that runner and bundle are on the phone, whichever tests ran before."""
    if "bundle-" not in phone.shell(f"ls {ROOT}"):
        bench(cli, phone, bundle)


def test_devices(cli, phone):
    (found,) = json.loads(cli("devices", "--json", env=phone.env, check=0).stdout)
    assert found["serial"] == SERIAL
    assert (found["model"], found["abi"], found["machine"]) == (
        "Fake Phone",
        "arm64-v8a",
        "aarch64",
    )
    assert (found["battery_percent"], found["temperature_c"]) == (83, 41.2)
    assert (found["thermal_status"], found["power"], found["emulated"]) == ("light", "mains", True)
    assert found["page_size"] is None  # busybox has no getconf
    shown = cli("devices", env=phone.env, check=0).stdout
    assert shown.split()[:2] == ["--device", f"adb:{SERIAL}"]  # as it is typed, on one line
    assert "correctness only" in shown


def test_bench(cli, phone, bundle):
    """A configuration is pushed, checked, run and cleaned up; a second one pushes nothing."""
    done = bench(cli, phone, bundle, "--json")
    (result,) = [BenchResult.from_dict(row) for row in json.loads(done.stdout)]
    assert (result.status, result.reason) == ("ok", None)
    assert (result.device.kind, result.device.emulated) == ("adb", True)
    assert (result.device.model, result.device.os_version) == ("Fake Phone", "Android 14")
    assert SERIAL not in done.stdout
    assert (result.artifact.engine, result.conditions.engine) == (
        "onnxruntime 1.32.0 native",
        "native",
    )
    assert (result.conditions.temperature_c, result.conditions.temperature_after_c) == (41.2, 41.2)
    assert len(result.samples.repetitions) == 1
    assert result.memory is None
    assert result.cache.bytes_per_token.declared == result.cache.bytes_per_token.formula
    assert "emulated" in result.cache.bytes_per_token.reason
    assert "checking the golden vectors" in done.stderr
    assert "copying" in done.stderr
    files = phone.shell(f"cd {ROOT} && find . -type f").split()
    assert not [f for f in files if "job-" in f]
    again = bench(cli, phone, bundle)
    assert "copying" not in again.stderr
    assert "correctness" in again.stdout
    # Nothing else was written on the device.
    assert phone.shell("ls -A /data/local/tmp").split() == ["edgeqkv"]


def test_wrong_logits_are_no_speed(cli, phone, bundle, tmp_path):
    import shutil

    from edgeqkv.artifact import read_golden

    wrong = shutil.copytree(bundle, tmp_path / "wrong")
    golden = read_golden(wrong)
    logits = np.roll(golden.decode_logits, 1, axis=1)
    set_golden(wrong, dataclasses.replace(golden, decode_logits=logits))
    done = bench(cli, phone, wrong, "--json", check=1)
    (result,) = [BenchResult.from_dict(row) for row in json.loads(done.stdout)]
    assert result.status == "failed"
    assert result.reason.startswith("parity: logit ")
    assert result.samples is None


def test_a_changed_copy_is_pushed_again(cli, phone, bundle):
    pushed(cli, phone, bundle)
    phone.shell(f"for f in {ROOT}/bundle-*/model.onnx; do echo broken > $f; done")
    done = bench(cli, phone, bundle)
    assert "copying 1 file " in done.stderr


def test_a_missing_loader_is_pushed_again_and_lost_between_runs_is_one_line(
    cli, phone, bundle, monkeypatch
):
    loader = f"{ROOT}/runner-*/lib/ld-linux-aarch64.so.1"
    pushed(cli, phone, bundle)
    phone.shell(f"rm {loader}")
    assert "copying 1 file " in bench(cli, phone, bundle).stderr
    # What the hashes cannot see: they are taken once in a sweep.
    monkeypatch.setenv("ADB_SERVER_SOCKET", phone.env["ADB_SERVER_SOCKET"])
    device = AdbDevice(SERIAL)
    work = Workload(
        n_prompt=6, n_gen=0, n_depth=0, n_threads=1, repetitions=1, warmup=0, seed=1, order=0
    )
    asked = {"pass": "time", "bundle": str(bundle), "workload": dataclasses.asdict(work)}
    device.run(asked, 120)
    phone.shell(f"rm {loader}")
    with pytest.raises(JobFailed, match="the runner does not start on this device"):
        device.run(asked, 120)
    device.close()
    assert "job-" not in phone.shell(f"ls {ROOT}")


def test_wrong_abi(cli, phone, bundle):
    phone.shell("echo armeabi-v7a > /data/local/tmp/.abi")
    try:
        done = bench(cli, phone, bundle, "--json", check=1)
    finally:
        phone.shell("rm /data/local/tmp/.abi")
    assert "no runner for ABI 'armeabi-v7a'" in json.loads(done.stdout)[0]["reason"]


def test_a_killed_runner_is_one_line(cli, phone, bundle):
    kill = f"while ! p=$(cat {ROOT}/job-*/pid); do :; done; kill -9 $p"
    killer = threading.Thread(target=phone.shell, args=(f"({kill}) 2>/dev/null",))
    killer.start()
    done = bench(cli, phone, bundle, "--json", check=1)
    killer.join()
    (result,) = json.loads(done.stdout)
    assert "killed by SIGKILL" in result["reason"]
    assert "job-" not in phone.shell(f"ls {ROOT}")


def test_a_time_limit_ends_the_runner_too(cli, phone, bundle):
    done = bench(cli, phone, bundle, "--json", "--timeout", "0.2", "-r", "500", check=1)
    assert "hung" in json.loads(done.stdout)[0]["reason"]
    # Its own path: ps there also lists this machine's processes, other tests' among them.
    for _ in range(20):
        if "bin/edgeqkv-bench" not in (running := phone.shell("ps")):
            break
        time.sleep(0.5)
    assert "bin/edgeqkv-bench" not in running


def test_unplugged_in_a_run_loses_nothing(cli, bundle, tmp_path):
    """Two configurations: the first is done, the second is under way when the cable goes.

    It is stopped there, so that no machine is quick enough to end it before.
    """
    stop = f"while ! p=$(cat {ROOT}/job-*/pid); do sleep 0.1; done; kill -STOP $p"
    out = tmp_path / "r.jsonl"
    with fakephone.booted() as phone:
        more = ("-p", "6,7", "-o", out)
        done = []
        run = threading.Thread(
            target=lambda: done.append(bench(cli, phone, bundle, *more, check=None))
        )
        run.start()
        while not out.exists() or not out.stat().st_size:
            assert run.is_alive()
            time.sleep(0.05)
        phone.shell(f"({stop}) 2>/dev/null")
        phone.unplug()
        run.join()
        assert done[0].returncode == 1
        assert f"error: {SERIAL} is gone (unplugged or rebooting)" in done[0].stderr
        assert len(read_results(out)[0]) == 1
        phone.plug()
        bench(cli, phone, bundle, *more, "--resume")
    results = read_results(out)[0]
    assert sorted(r.workload.n_prompt for r in results) == [6, 7]
    assert {r.status for r in results} == {"ok"}


def test_unplugged_in_a_push_then_plugged_in(cli, bundle):
    with fakephone.booted() as phone:
        done = []
        run = threading.Thread(target=lambda: done.append(bench(cli, phone, bundle, check=None)))
        run.start()
        while not phone.shell(f"ls {ROOT}").strip():
            assert run.is_alive()
        phone.unplug()
        run.join()
        assert done[0].returncode == 1
        assert "Traceback" not in done[0].stderr
        assert SERIAL in done[0].stderr
        phone.plug()
        bench(cli, phone, bundle)


def test_a_full_phone(cli, bundle, monkeypatch):
    """Known before anything is copied; and where the phone does not tell, or fills as we copy."""
    with fakephone.booted(size="20m") as phone:
        done = bench(cli, phone, bundle, "--json", check=1)
        assert "20.0 MiB free" in json.loads(done.stdout)[0]["reason"]
        assert phone.shell(f"ls {ROOT}") == ""
        monkeypatch.setenv("ADB_SERVER_SOCKET", phone.env["ADB_SERVER_SOCKET"])
        adb, runner = Adb(SERIAL), build_folder("arm64", "onnx")
        silent = dataclasses.replace(read_phone(adb), free_bytes=None)
        with pytest.raises(EdgeQKVError, match=f"{SERIAL} is full: libonnx.* did not fit"):
            store.sync(adb, silent, runner.path, runner.files, "runner-x")


def test_clean(cli, phone):
    cli("device", "clean", env=phone.env, check=0)
    assert "edgeqkv" not in phone.shell("ls -A /data/local/tmp")
