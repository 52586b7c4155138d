"""The native runner: the same numbers as Python's, and no speed without the right logits."""

from __future__ import annotations

import dataclasses
import json
import mmap
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
from device_bench.devices.local import run_native
from device_bench.jobs import JobFailed
from device_bench.native import build, job
from device_bench.result import BenchResult, Memory, Samples
from device_bench.schema import build as parse
from device_bench.workload import Workload
from edgeqkv.artifact import read_artifact, read_golden
from edgeqkv.errors import UnsupportedError
from edgeqkv.limits import THRESHOLDS
from edgeqkv.runner import open_runner
from export.golden import make_golden
from tests.bundles import make_bundle
from tests.device_bench.goldens import exported, golden_bundle, set_golden
from tests.variants import random_decoder, spec

WORKLOAD = Workload(
    n_prompt=9, n_gen=4, n_depth=5, n_threads=1, repetitions=2, warmup=1, seed=3, order=0
)
CASES = [
    ("q-gqa", "shared", "gemm", "fp32"),
    ("gqa", "separate", "gemm", "fp16"),
    ("q-gqa", "shared", "gqa", "fp32"),
    ("gqa", "separate", "gqa", "fp32"),
    ("gqa", "separate", "gemm", "int8"),
    ("(q=k-v)+", "auto", "auto", "fp32"),  # not causal: no cache, no decode
]
# variant, format of the weights, of the cache
EXACT = [
    ("q-gqa", "fp32", "fp32"),
    ("q-gqa", "fp32", "int8"),
    ("gqa", "int8", "int8"),
    ("q-mqa", "int4", "fp16"),
]
linux = pytest.mark.skipif(not memory.supported(), reason="needs /proc/self/smaps_rollup")


def native(bundle: Path, name: str, workload: Workload = WORKLOAD, timeout_s: float = 60) -> object:
    asked = {"pass": name, "bundle": str(bundle), "workload": dataclasses.asdict(workload)}
    return run_native(asked, timeout_s)


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
    std = read_golden(bundle).prefill_logits.std()
    assert 0 < samples.golden_max_abs < THRESHOLDS[case[3]]["max_abs"] * 2 * std


@pytest.mark.parametrize("case", EXACT, ids="-".join)
def test_same_numbers_as_python_to_the_bit(tmp_path, case):
    """Golden logits that Python's runner computed: the same kernels leave no difference at all."""
    variant, weights, dtype = case
    bundle = exported(tmp_path / "b", "onnx", variant, weights=weights, dtype=dtype, layers=2)
    eager = native(bundle, "time")
    assert eager["samples"]["golden_max_abs"] > 0
    golden, runner = read_golden(bundle), open_runner(bundle)
    prefill = runner.prefill(golden.prompt_ids)
    decoded = np.stack([runner.decode(int(t)) for t in golden.decode_ids])
    runner.close()
    set_golden(bundle, dataclasses.replace(golden, prefill_logits=prefill, decode_logits=decoded))
    assert native(bundle, "time")["samples"]["golden_max_abs"] == 0


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
        assert r.samples.golden_max_abs > 0
    assert {r.samples.golden_max_abs for r in results["python"]} == {None}
    figures = results["native"][0].cache.bytes_per_token
    assert figures.formula == figures.declared
    assert figures.measured_cache in (None, figures.formula)
    usage = {k: next(r.memory for r in rows if r.memory) for k, rows in results.items()}
    assert isinstance(usage["native"], Memory)
    assert usage["native"].peak_rss < usage["python"].peak_rss - (10 << 20)
    assert usage["native"].after_import.rss > usage["native"].baseline.rss


@linux
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_resident_cache_is_its_pages(tmp_path, dtype):
    bundle = golden_bundle(tmp_path / "b", "q-gqa", "shared", "gemm", dtype)
    cache = read_artifact(bundle).cache
    (point,) = native(bundle, "capacity", WORKLOAD)
    assert point["tokens"] == cache.capacity
    rows = cache.num_key_value_heads * cache.capacity
    segments = [rows * cache.head_dim * cache.itemsize, rows * cache.scale_itemsize]
    pages = sum(-(-nbytes // mmap.PAGESIZE) for nbytes in segments)
    assert point["cache_bytes"] == pages * mmap.PAGESIZE * len(cache.names())


@linux
def test_slope_of_an_int8_cache_is_exact(tmp_path):
    """Rows and scales of 1024 tokens fill whole pages; none of them is there before the first."""
    model = spec(
        num_hidden_layers=1, num_key_value_heads=1, qkv_sharing="k=v", max_position_embeddings=1024
    )
    decoder = random_decoder(model)
    artifact, bundle = make_bundle("onnx", decoder, tmp_path / "b", dtype="int8")
    set_golden(bundle, make_golden(decoder, 64))
    points = native(bundle, "depth")
    assert [(p["tokens"], p["cache_bytes"]) for p in points] == [
        (0, 0),
        (1024, 1024 * artifact.cache.bytes_per_token),
    ]


def test_what_is_refused(tmp_path):
    bundle = golden_bundle(tmp_path / "b", *CASES[0])
    too_long = dataclasses.replace(WORKLOAD, n_gen=10**6)
    with pytest.raises(JobFailed, match="needs a context of 1000014 tokens, the bundle holds"):
        native(bundle, "time", too_long)
    artifact = read_artifact(bundle)
    narrow = dataclasses.replace(artifact.cache, dtype="int8")
    elsewhere = dataclasses.replace(
        artifact, backend="executorch", formulation="plain-bmm", cache=narrow
    )
    with pytest.raises(UnsupportedError, match="no cache dtype 'int8'; allowed: fp32, fp16"):
        job.check_supported(elsewhere, "b")
    for formulation, words in (
        ("custom-sdpa", "--et-attention plain"),
        ("optimum", "--io optimum"),
    ):
        with pytest.raises(UnsupportedError, match=rf"'{formulation}'; allowed: .*{words}"):
            job.check_supported(dataclasses.replace(artifact, formulation=formulation), "b")
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
