"""Write a job for the native runner: lines of ``key value`` and raw little-endian arrays beside them.

The manifest and the golden vectors are read here, so that the C side needs neither a JSON nor a
safetensors parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_bench import memory
from device_bench.runners import run_onnx
from device_bench.schema import build
from device_bench.workload import Workload
from edgeqkv.artifact import Artifact, Golden, read_golden
from edgeqkv.errors import UnsupportedError
from edgeqkv.limits import THRESHOLDS
from edgeqkv.quant import GROUPED

JOB = "job.txt"
BACKENDS = ("onnx", "executorch")
FORMULATIONS = ("gemm-prefix", "gqa-aliased", "full", "plain-bmm")
# Known formulations of other runners: what to do about them.
_INSTEAD = {
    "custom-sdpa": "; its operators need torch in the process: export with --et-attention plain",
    "optimum": "; export without --io optimum",
}
CACHE_DTYPES = {"onnx": ("fp32", "fp16", "int8"), "executorch": ("fp32", "fp16")}


def check_supported(artifact: Artifact, where: str) -> None:
    """Raise UnsupportedError for what the native runner cannot do, before anything is pushed."""
    for what, found, allowed in (
        ("backend", artifact.backend, BACKENDS),
        ("formulation", artifact.formulation, FORMULATIONS),
        ("cache dtype", artifact.cache.dtype, CACHE_DTYPES.get(artifact.backend, ())),
    ):
        if found not in allowed:
            raise UnsupportedError(
                f"{where}: the native runner has no {what} {found!r}; allowed: "
                f"{', '.join(allowed)}{_INSTEAD.get(found, '')}"
            )


def write_job(
    folder: Path,
    artifact: Artifact,
    bundle: Path,
    job: Mapping[str, Any],
    *,
    model: str,
    library: str,
    page: int,
    limit_s: int = 0,
    cores: Sequence[int] = (),
) -> None:
    """Write ``job.txt`` and its arrays into ``folder``, the directory the runner will run in.

    job: as ``device_bench.worker`` takes it. model, library: paths as the runner will see them.
    page: bytes of a memory page there. limit_s: seconds after which the runner ends itself.
    cores: CPUs that it may run on; all where none is named.
    """
    workload: Workload = build(Workload, job["workload"], "workload")
    golden, model_spec, cache = read_golden(bundle), artifact.model, artifact.cache
    capacity = job.get("capacity", cache.capacity)
    depths = memory.slope_depths(cache, capacity, page=page) if job["pass"] == "depth" else []
    ids = _ids(job["pass"], artifact, workload, depths, capacity)
    prompt = np.concatenate([golden.prompt_ids, golden.decode_ids])
    logits = np.vstack([golden.prefill_logits, golden.decode_logits])
    arrays = {"ids": ids, "golden_ids": prompt, "golden_logits": logits}
    lines: list[tuple[str, object]] = [
        ("pass", job["pass"]),
        ("model", model),
        ("library", library or "-"),
        ("formulation", artifact.formulation),
        ("cache_dtype", cache.dtype),
        ("threads", workload.n_threads),
        ("capacity", capacity),
        ("vocab", model_spec.vocab_size),
        ("used", model_spec.used_tokens),
        ("prefill_chunk", artifact.prefill_chunk),
        ("score_bytes", run_onnx.SCORE_BYTES),
        ("least_chunk", run_onnx.LEAST_CHUNK),
        ("heads", model_spec.num_attention_heads),
        ("kv_heads", cache.num_key_value_heads),
        ("head_dim", cache.head_dim),
        ("itemsize", cache.itemsize),
        ("depth", workload.n_depth),
        ("prompt", workload.n_prompt),
        ("gen", workload.n_gen),
        ("warmup", workload.warmup),
        ("repetitions", workload.repetitions),
        ("limit_s", limit_s),
        ("golden_prompt", len(golden.prompt_ids)),
        ("golden_limit", _limit(artifact, golden)),
        *(("tensor", name) for name in cache.names()),
        *(("scale", name) for name in cache.scale_names()),
        *(("output", suffix) for suffix in _outputs(artifact)),
        *(("option", f"{key}={value}") for key, value in _options(artifact).items()),
        *(("at", depth) for depth in depths),
        *(("core", core) for core in cores),
    ]
    for name, array in arrays.items():
        dtype = "<f4" if name == "golden_logits" else "<i8"
        (folder / name).write_bytes(np.ascontiguousarray(array, dtype).tobytes())
        lines.append((name, name))
    text = "".join(f"{key} {value}\n" for key, value in lines)
    if text.count("\n") != len(lines):
        raise UnsupportedError(f"{bundle}: a path with a line break cannot be measured; rename it")
    (folder / JOB).write_text(text, "utf-8")


def _ids(
    name: str, artifact: Artifact, workload: Workload, depths: Sequence[int], capacity: int
) -> NDArray[np.int64]:
    """The token ids that ``device_bench.measure`` draws for the same pass."""
    used = artifact.model.used_tokens
    if name in ("time", "memory"):
        return workload.ids(used)
    count = depths[-1] if name == "depth" else capacity
    return np.random.default_rng(workload.seed).integers(0, used, count, dtype=np.int64)


def _limit(artifact: Artifact, golden: Golden) -> float:
    """verify's: kernels differ between CPUs, so nothing is compared bit for bit."""
    used = artifact.model.used_tokens
    rows = np.vstack([golden.prefill_logits, golden.decode_logits])[:, :used]
    return THRESHOLDS[artifact.numerics]["max_abs"] * float(rows.astype(np.float64).std())


def _outputs(artifact: Artifact) -> Sequence[str]:
    """What follows a tensor's name in the graph's outputs; "-" is nothing (no value is empty)."""
    if artifact.formulation != "gqa-aliased":
        return ()
    return ("-",) if artifact.cache.layout == "separate" else (".key", ".value")


def _options(artifact: Artifact) -> dict[str, str]:
    """Session options of run_onnx: integer weights are packed, float weights stay mapped."""
    if artifact.backend != "onnx":
        return {}
    packed = bool(artifact.quantisation.recipe.schemes & set(GROUPED))
    return {"session.disable_prepacking": "0" if packed else "1"}
