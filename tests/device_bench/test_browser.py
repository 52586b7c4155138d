"""Bundles in a real browser: the numbers are right, and what the browser allows is recorded."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from device_bench.result import BenchResult, read_results
from edgeqkv.artifact import read_golden, write_golden
from tests.device_bench import fakephone
from tests.device_bench.browsing import SOFTWARE_GPU, Bench, browse, copy_with_golden, kill
from tests.onnx_bundles import decoder_of, onnx_bundle

CASES = {  # variant, layout, attention, dtype, layers
    "gemm": ("q-gqa", "shared", "gemm", "fp32", 2),
    "gqa-shared": ("q-gqa", "shared", "gqa", "fp32", 1),
    "gqa-separate": ("gqa", "separate", "gqa", "fp32", 1),
}
BINDINGS = {
    "gemm": "prefix views of one block, rows written in place",
    "gqa-shared": "past and present are one block",
    "gqa-separate": "past and present are one block",
}
# 20 tokens in, 5 out, after 7: the prefill appends to a cache that holds some already.
WORK = ("-p", "0", "-n", "0", "-pg", "20,5", "-d", "7", "-r", "2", "--timeout", "60")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bundles")
    return {
        name: copy_with_golden(onnx_bundle(*case)[1], root / name, decoder_of(case[0], case[-1]))
        for name, case in CASES.items()
    }


def wrong_golden(bundle: Path, target: Path, decoder: object) -> Path:
    """The same bundle, with golden vectors in which one token's row is another's."""
    copy_with_golden(bundle, target, decoder)
    golden = read_golden(target)
    golden.decode_logits[[0, 1]] = golden.decode_logits[[1, 0]]
    write_golden(target, golden)
    manifest = target / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")  # another bundle, by its sha256
    return target


def by_name(out: Path) -> dict[tuple[str, int], BenchResult]:
    return {(r.artifact.name, r.workload.n_threads): r for r in read_results(out)[0]}


def test_both_formulations_with_one_thread_and_two(bundles, tmp_path, cli):
    out = tmp_path / "r.jsonl"
    wrong = wrong_golden(onnx_bundle(*CASES["gemm"])[1], tmp_path / "wrong", decoder_of("q-gqa", 2))
    asked = (*bundles.values(), wrong, *WORK, "-t", "1,2", "-o", out)
    with Bench(*asked) as bench, browse(bench.url):
        status, stdout, stderr = bench.finish()
    assert status == 0, stderr
    results = by_name(out)
    assert set(results) == {(name, t) for name in (*CASES, "wrong") for t in (1, 2)}
    for (name, threads), r in results.items():
        if name == "wrong":
            assert r.status == "failed"
            assert r.samples is None
            assert re.match(r"parity: .*: logits differ by .* standard deviations", r.reason)
            continue
        assert (r.status, r.reason) == ("ok", None), r.reason
        assert (r.device.kind, r.device.emulated) == ("browser", False)
        assert (r.artifact.engine, r.artifact.interpreted) == ("onnxruntime-web wasm", False)
        assert (r.conditions.engine, r.conditions.threads, r.conditions.python) == (
            "wasm",
            threads,
            None,
        )
        assert [len(times) for times in r.samples.repetitions] == [6, 6]
        assert all(np.all(np.diff(times) > 0) for times in r.samples.repetitions)
        page = r.samples.browser
        assert page.cross_origin_isolated
        assert page.gpu is None
        assert page.cache_binding == BINDINGS[name]
        assert "Chrome" in page.user_agent
        assert 0 < page.timer_resolution_ns <= 1_000_000
        assert 16 << 20 <= page.heap_load_bytes <= page.heap_bytes < 256 << 20
        figures = r.cache.bytes_per_token
        assert figures.formula == figures.declared
        assert figures.measured_cache is None
        assert "does not tell which pages" in figures.reason
        assert r.memory is None
    assert "failed: onnx Q-GQA-2 shared pp20+tg5 @ d7, 1 thread: parity:" in stdout
    table = cli("compare", out, "--markdown", check=0).stdout
    assert table.count("Q-GQA-2") >= 2


def test_a_page_that_is_not_isolated_has_one_thread(bundles, tmp_path):
    """Plain http from another host than localhost, as a phone in the network sees it."""
    out = tmp_path / "r.jsonl"
    with Bench(bundles["gemm"], *WORK, "-t", "1,2", "-o", out) as bench:
        there = bench.url.replace("127.0.0.1", "phone.test")
        with browse(there, "--host-resolver-rules=MAP phone.test 127.0.0.1"):
            status, _, stderr = bench.finish()
    assert status == 0, stderr
    results = by_name(out)
    one, two = results["gemm", 1], results["gemm", 2]
    assert one.status == "ok", one.reason
    assert not one.samples.browser.cross_origin_isolated
    assert two.status == "failed"
    assert "2 threads need a page that is isolated; open the page by https" in two.reason


def test_webgpu_rendered_in_software_is_correctness_only(bundles, tmp_path, cli):
    out = tmp_path / "r.jsonl"
    flags = ("--engine", "webgpu", "-p", "0", "-n", "0", "-pg", "3,2", "-r", "1", "-o", out)
    asked = (*bundles.values(), *flags, "--timeout", "300")
    with Bench(*asked) as bench, browse(bench.url, *SOFTWARE_GPU):
        status, _, stderr = bench.finish()
    if "no WebGPU" in stderr:
        pytest.skip(f"this Chromium has no software WebGPU: {stderr}")
    assert status == 0, stderr
    results = {name: r for (name, _), r in by_name(out).items()}
    for name in ("gqa-shared", "gqa-separate"):
        r = results[name]
        assert (r.status, r.reason) == ("ok", None), r.reason
        assert (r.artifact.engine, r.conditions.engine) == ("onnxruntime-web webgpu", "webgpu")
        assert r.device.emulated
        assert r.samples.browser.gpu
        copies = "two GPU buffers" in r.samples.browser.cache_binding
        assert copies == (name == "gqa-shared")
    assert "WebGPU cannot bind the empty prefix" in results["gemm"].reason
    assert "correctness only" in cli("compare", out, "--markdown", check=0).stdout


def test_a_killed_browser_keeps_what_is_finished(bundles, tmp_path):
    out = tmp_path / "r.jsonl"
    sizes = ("-p", "8", "-n", "0", "-d", "0-7", "-r", "2", "-t", "1")
    with Bench(bundles["gemm"], *sizes, "-o", out) as bench, browse(bench.url) as browser:
        bench.wait_for(r"\[1/8\]")
        kill(browser)
        start = time.monotonic()
        status, _, stderr = bench.finish()
    assert time.monotonic() - start < 40
    assert status == 1
    assert re.search(r"error: the browser is gone: .* --resume", stderr)
    results, _ = read_results(out)
    assert 1 <= len(results) < 8
    assert {r.status for r in results} == {"ok"}


def test_a_phone_by_cable(bundles, tmp_path):
    """adb reverse: localhost on the phone, and so threads; the phone is asked to open the link.

    The fake phone has a network of its own, in which the bench and the browser are put too.
    """
    fakephone.skip_unless_possible()
    out = tmp_path / "r.jsonl"
    with fakephone.booted() as phone:
        inside = ["nsenter", f"--target={phone.pid}", "--user", "--net", "--preserve-credentials"]
        where = {"way": f"adb:{fakephone.SERIAL}", "inside": inside, "env": phone.env}
        with Bench(bundles["gemm"], *WORK, "-t", "2", "-o", out, **where) as bench:
            asked = "cat /data/local/tmp/.am"
            deadline = time.monotonic() + 30
            while not (said := phone.shell(asked).strip()) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert said == f"start -a android.intent.action.VIEW -d {bench.url}"
            assert bench.url.startswith("http://localhost:")
            with browse(bench.url, inside=inside):
                status, _, stderr = bench.finish()
    assert status == 0, stderr
    (result,) = read_results(out)[0]
    assert (result.status, result.workload.n_threads) == ("ok", 2), result.reason
    assert result.samples.browser.cross_origin_isolated
