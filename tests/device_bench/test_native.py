"""The native runner: the same numbers as Python's, and no speed without the right logits."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
if shutil.which("cc") is None:
    pytest.skip("no C compiler", allow_module_level=True)

from device_bench import memory
from device_bench.devices.local import NativeHere
from device_bench.jobs import JobFailed
from device_bench.native import build, job
from device_bench.result import BenchResult, Memory, Samples
from device_bench.schema import build as parse
from device_bench.workload import Workload
from edgeqkv.artifact import read_artifact, read_golden
from edgeqkv.runner import open_runner
from export.golden import make_golden
from export.verify import THRESHOLDS
from tests.device_bench.goldens import golden_bundle, set_golden

WORKLOAD = Workload(
    n_prompt=9, n_gen=4, n_depth=5, n_threads=1, repetitions=2, warmup=1, seed=3, order=0
)
CASES = [
    ("q-gqa", "shared", "gemm", "fp32"),
    ("gqa", "separate", "gemm", "fp16"),
    ("q-gqa", "shared", "gqa", "fp32"),
    ("gqa", "separate", "gqa", "fp32"),
    ("(q=k-v)+", "auto", "auto", "fp32"),  # not causal: no cache, no decode
]
linux = pytest.mark.skipif(not memory.supported(), reason="needs /proc/self/smaps_rollup")


def native(bundle: Path, name: str, workload: Workload = WORKLOAD, timeout_s: float = 60) -> object:
    asked = {"pass": name, "bundle": str(bundle), "workload": dataclasses.asdict(workload)}
    return NativeHere().run(asked, timeout_s)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(c))
def test_time_pass(tmp_path, case):
    """The golden vectors hold, the times are ordered and as many as the workload asks for."""
    bundle = golden_bundle(tmp_path / "b", *case)
    causal = case[0] != "(q=k-v)+"
    work = WORKLOAD if causal else dataclasses.replace(WORKLOAD, n_gen=0, n_depth=0)
    value = native(bundle, "time", work)
    samples = parse(Samples, value["samples"], "samples")
    tokens = 1 + work.n_gen
    assert len(samples.repetitions) == 2
    assert all(len(r) == tokens for r in (samples.warmup, *samples.repetitions))
    assert all(list(r) == sorted(r) and r[0] > 0 for r in samples.repetitions)
    assert samples.import_ns > 0
    assert value["engine"].startswith("onnxruntime 1.")
    golden = read_golden(bundle)
    std = golden.prefill_logits.std()
    assert 0 < value["golden_max_abs"] < job.PARITY["fp16" if "fp16" in case else "fp32"] * 2 * std


def test_same_numbers_as_python_to_the_bit(tmp_path):
    """Golden logits that Python's runner computed: the same kernels leave no difference at all."""
    bundle = golden_bundle(tmp_path / "b", *CASES[0])
    golden, runner = read_golden(bundle), open_runner(bundle)
    prefill = runner.prefill(golden.prompt_ids)
    decoded = np.stack([runner.decode(int(t)) for t in golden.decode_ids])
    runner.close()
    set_golden(bundle, dataclasses.replace(golden, prefill_logits=prefill, decode_logits=decoded))
    assert native(bundle, "time")["golden_max_abs"] == 0


@pytest.mark.parametrize("what", ["prefill_logits", "decode_logits"])
def test_wrong_logits_are_no_speed(tmp_path, what):
    bundle = golden_bundle(tmp_path / "b", *CASES[0])
    golden = read_golden(bundle)
    wrong = getattr(golden, what).copy()
    wrong[..., 3] += 0.5
    set_golden(bundle, dataclasses.replace(golden, **{what: wrong}))
    token = {"prefill_logits": 0, "decode_logits": 1}[what]
    with pytest.raises(JobFailed, match=rf"parity: logit 3 of token {token} is .*allowed"):
        native(bundle, "time")


def test_parity_is_what_verify_allows():
    assert {k: v["max_abs"] for k, v in THRESHOLDS.items()} == job.PARITY


@linux
def test_bench_of_the_native_engine(tmp_path, cli):
    """The triple agrees, every stage is there, and the process is smaller than Python's."""
    bundle = golden_bundle(tmp_path / "b", *CASES[0])
    results = {}
    for engine in ("native", "python"):
        flags = ("-p", "8", "-n", "2", "-r", "2", "--processes", "1", "--seed", "1", "--json")
        done = cli("bench", bundle, *flags, "--engine", engine, check=0)
        results[engine] = [BenchResult.from_dict(row) for row in json.loads(done.stdout)]
    for r in results["native"]:
        assert (r.status, r.conditions.engine, r.conditions.python) == ("ok", "native", None)
        assert r.device.kind == "local"
        assert r.artifact.engine.endswith(" native")
    figures = results["native"][0].cache.bytes_per_token
    assert figures.formula == figures.declared
    assert figures.measured_cache in (None, figures.formula)
    usage = {k: next(r.memory for r in rows if r.memory) for k, rows in results.items()}
    assert isinstance(usage["native"], Memory)
    assert usage["native"].peak_rss < usage["python"].peak_rss - (10 << 20)
    assert usage["native"].after_import.rss > usage["native"].baseline.rss


@linux
def test_slope_of_the_cache_is_exact(tmp_path):
    bundle = golden_bundle(tmp_path / "b", *CASES[0])
    artifact = read_artifact(bundle)
    # The tiny model's context is shorter than six pages of rows: pretend pages are smaller.
    points = native(bundle, "capacity", WORKLOAD)
    (point,) = points
    assert point["tokens"] == artifact.cache.capacity
    row = artifact.cache.num_key_value_heads * artifact.cache.head_dim * artifact.cache.itemsize
    pages = -(-row * artifact.cache.capacity // 4096) * 4096
    assert point["cache_bytes"] == pages * len(artifact.cache.names())


def test_what_is_refused(tmp_path):
    bundle = golden_bundle(tmp_path / "b", *CASES[0])
    too_long = dataclasses.replace(WORKLOAD, n_gen=10**6)
    with pytest.raises(JobFailed, match="needs a context of 1000014 tokens, the bundle holds"):
        native(bundle, "time", too_long)
    (bundle / "model.onnx").write_bytes(b"\x08\x07garbage")
    with pytest.raises(JobFailed, match=r"bytes, manifest says|cannot be loaded"):
        native(bundle, "time")


def test_no_compiler_is_one_line(tmp_path, monkeypatch):
    bundle = golden_bundle(tmp_path / "b", *CASES[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobFailed, match="needs a C compiler"):
        native(bundle, "time")


def test_a_changed_source_is_compiled_anew(tmp_path, monkeypatch):
    sources = tmp_path / "native"
    shutil.copytree(build.HERE, sources)
    before = build.fingerprint("onnx")
    monkeypatch.setattr(build, "HERE", sources)
    assert build.fingerprint("onnx") == before
    (sources / "bench.c").write_text("// other\n")
    assert build.fingerprint("onnx") != before


@linux
def test_executorch(tmp_path):
    """Parity, and the cache's own arena told from all others, in the same passes."""
    pytest.importorskip("executorch.exir")
    from tests.et_bundles import et_bundle

    decoder, _, source = et_bundle("q-mqa", "shared")
    bundle = shutil.copytree(source, tmp_path / "b")
    artifact = read_artifact(bundle)
    golden = make_golden(decoder, artifact.cache.capacity)
    set_golden(bundle, golden)
    value = native(bundle, "time")
    assert value["engine"] == "executorch native"
    assert len(parse(Samples, value["samples"], "samples").repetitions[0]) == 1 + WORKLOAD.n_gen
    (point,) = native(bundle, "capacity")
    assert 0 < point["cache_bytes"] <= artifact.cache.nbytes
    set_golden(bundle, dataclasses.replace(golden, prefill_logits=golden.prefill_logits + 1))
    with pytest.raises(JobFailed, match="parity"):
        native(bundle, "time")
