"""Every variant on CPUs with other instructions, for which the runtimes take other kernels."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytest.importorskip("executorch.exir")

from device_bench.devices.qemu import CPUS
from device_bench.result import BenchResult
from export.golden import make_golden
from tests.device_bench import fakephone
from tests.device_bench.goldens import exported, set_golden
from tests.et_bundles import et_bundle
from tests.variants import LAYOUTS, NON_CAUSAL, VARIANTS

INTEGERS = {
    "executorch-int4": ("executorch", "q-mqa", {"weights": "int4"}),
    "executorch-int8": ("executorch", "qkv", {"weights": "int8"}),
    "onnx-int4": ("onnx", "qkv", {"weights": "int4"}),
    "onnx-int8": ("onnx", "q-mqa", {"weights": "int8"}),
    "onnx-int4-int8-cache": ("onnx", "q-k=v", {"weights": "int4", "dtype": "int8"}),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """ExecuTorch: one method, and what other tests lower too; the emulator takes most of the time
    to start ONNX Runtime."""
    fakephone.skip_unless_possible()
    root = tmp_path_factory.mktemp("kernels")
    made = {}
    layouts = dict(reversed(LAYOUTS)) | dict.fromkeys(NON_CAUSAL, "auto")
    for i, variant in enumerate(VARIANTS):
        decoder, artifact, source = et_bundle(variant, layouts[variant])
        made[f"executorch-{i}"] = shutil.copytree(source, root / f"executorch-{i}")
        set_golden(made[f"executorch-{i}"], make_golden(decoder, artifact.cache.capacity))
        made[f"onnx-{i}"] = exported(root / f"onnx-{i}", "onnx", variant)
    for name, (backend, variant, how) in INTEGERS.items():
        plain = {"et_attention": "plain", "capacity": 40} if backend == "executorch" else {}
        made[name] = exported(root / name, backend, variant, **how, **plain)
    return made


@pytest.mark.parametrize("cpu", CPUS)
def test_parity(cli, bundles, cpu, tmp_path):
    """All of ExecuTorch's, the integers of both, and of ONNX's floats a third, so that each is run."""
    others = {f"onnx-{i}" for i in range(len(VARIANTS)) if list(CPUS)[i % 3] != cpu}
    asked = {name: bundle for name, bundle in bundles.items() if name not in others}
    quick = ("-p", "6", "-n", "0", "-r", "1", "--processes", "1", "--no-memory", "--device", "adb")
    with fakephone.booted(cpu) as phone:
        done = cli("bench", *asked.values(), *quick, "--json", env=phone.env, timeout=900)
    results = [BenchResult.from_dict(row) for row in json.loads(done.stdout)]
    # ok: no logit was further from the eager model's than edgeqkv.limits allows. Some differ.
    assert [(r.artifact.name, r.reason) for r in results if r.status != "ok"] == []
    assert {r.artifact.name for r in results} == set(asked)
    assert all(r.samples.golden_max_abs > 0 for r in results)
