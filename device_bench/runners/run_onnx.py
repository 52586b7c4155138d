"""Runs an ONNX bundle with ONNX Runtime on the CPU; numpy and onnxruntime only.

The cache is one anonymous memory mapping that this runner owns and the session is bound to: new
rows are written straight into it, and a page costs memory only once a row was written there.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_bench.runners import onnx_optimum_io
from device_bench.runners.onnx_signature import check_signature
from edgeqkv.artifact import Artifact, inside
from edgeqkv.cache import CacheSpec
from edgeqkv.errors import (
    BundleError,
    MissingDependencyError,
    RunError,
    UnsupportedError,
    first_line,
)
from edgeqkv.quant import GROUPED
from edgeqkv.runner import Runner, check_tokens, shut

RUNTIME = "onnxruntime"  # the bench imports it first, to tell its memory and time from load's
# Prefill bounds one copy of a layer's scores [H, S, T + S] float32; the runtime holds a few at once.
SCORE_BYTES = 16 << 20
LEAST_CHUNK = 16
_DTYPES = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}


def load(artifact: Artifact, directory: Path, *, threads: int, capacity: int) -> Runner:
    """Open the bundle's program.

    Raises:
        MissingDependencyError: no onnxruntime. BundleError: the model file cannot be loaded, or
        is not what the manifest says.
        UnsupportedError: a formulation this runner does not know.
    """
    known = (*_BINDERS, onnx_optimum_io.FORMULATION)
    if artifact.formulation not in known:
        raise UnsupportedError(
            f"{directory}: formulation {artifact.formulation!r} is unknown to this runner; "
            f"allowed: {', '.join(known)}"
        )
    packed = bool(artifact.quantisation.recipe.schemes & set(GROUPED))
    path = inside(directory, artifact.entry)
    session = _session(path, threads, packed)
    check_signature(session, artifact, path)
    if artifact.formulation == onnx_optimum_io.FORMULATION:
        return onnx_optimum_io.OptimumIoRunner(artifact, session, capacity)
    return OnnxRunner(artifact, session, capacity)


def _session(path: Path, threads: int, packed: bool) -> Any:
    try:
        import onnxruntime as ort
    except ImportError:
        raise MissingDependencyError(
            "running an ONNX bundle needs onnxruntime; pip install 'edgeqkv[onnx]'"
        ) from None
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # fatal only: errors arrive as exceptions
    # Float weights stay the mapped pages of the file, a tied embedding one of them; packing would
    # copy each into private memory, for a decode that is no faster. Integers are multiplied only when
    # packed: without it the operator widens the whole matrix on every call.
    options.add_session_config_entry("session.disable_prepacking", "0" if packed else "1")
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as e:  # onnxruntime raises its own classes, derived from Exception only
        raise BundleError(
            f"{path} cannot be loaded by onnxruntime: {first_line(e)}; export the bundle again"
        ) from None


class CacheMemory:
    """One anonymous mapping for the cache of all layers; segments start on pages.

    address(i): start of tensor i of ``CacheSpec.names()``, [G, capacity, D]; then come those of
    ``CacheSpec.scale_names()``, [G, capacity] float32.
    """

    def __init__(self, cache: CacheSpec, capacity: int) -> None:
        rows = cache.num_key_value_heads * capacity
        tensors = len(cache.names())
        self.stride = _pages(rows * cache.head_dim * cache.itemsize)
        self.scale_stride = _pages(rows * cache.scale_itemsize)
        self.nbytes = (self.stride + self.scale_stride) * tensors
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A huge page would make 2 MiB resident for the first token.
        self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.array = np.frombuffer(self._map, np.uint8)
        self.start = self.array.ctypes.data
        self.scale_start = self.start + self.stride * tensors

    def address(self, tensor: int) -> int:
        return self.start + tensor * self.stride

    def scale_address(self, tensor: int) -> int:
        return self.scale_start + tensor * self.scale_stride

    def release(self) -> None:
        """Give every page back to the system; reads as zeros."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def chunk_tokens(artifact: Artifact, past: int) -> int:
    """Tokens that one prefill call takes at depth ``past``: fewer as the rows of scores grow."""
    most = artifact.prefill_chunk
    row = artifact.model.num_attention_heads * 4 * (past + most)
    return min(most, max(LEAST_CHUNK, SCORE_BYTES // row))


class OnnxRunner:
    """See ``edgeqkv.runner.Runner``."""

    engine = "onnxruntime"
    interpreted = False

    def __init__(self, artifact: Artifact, session: Any, capacity: int) -> None:
        self.artifact, self.capacity, self.position = artifact, capacity, 0
        self._session = session
        self._io = session.io_binding()
        self._logits: NDArray[np.float32] = np.empty((1, 1, artifact.model.vocab_size), np.float32)
        self._bind_output("logits", self._logits)
        self._memory = CacheMemory(artifact.cache, capacity) if artifact.cache.names() else None
        self._bind = _BINDERS[artifact.formulation](self)

    def _bind_input(self, name: str, array: NDArray[Any]) -> None:
        self._io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _bind_output(self, name: str, array: NDArray[Any]) -> None:
        self._io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _step(self, ids: NDArray[np.int64]) -> None:
        ids = np.ascontiguousarray(ids, np.int64)
        self._io.bind_input("input_ids", "cpu", 0, np.int64, (1, ids.size), ids.ctypes.data)
        self._bind(self.position, ids.size)
        self._session.run_with_iobinding(self._io)
        self.position += ids.size

    def reset(self) -> None:
        self.position = 0
        if self._memory is not None:
            self._memory.release()

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        ids = np.asarray(ids)
        if self._memory is None:  # nothing is kept, so every input is a whole one
            self.position = 0
        check_tokens(self, ids)
        while ids.size:
            chunk = ids.size if self._memory is None else chunk_tokens(self.artifact, self.position)
            self._step(ids[:chunk])
            ids = ids[chunk:]
        return self._logits.reshape(-1).copy()

    def decode(self, token: int) -> NDArray[np.float32]:
        if self._memory is None:
            raise RunError(
                f"{self.artifact.model.label} is not causal: it has no decode; prefill the whole input"
            )
        ids = np.array([token])
        check_tokens(self, ids)
        self._step(ids)
        return self._logits.reshape(-1).copy()

    def cache_regions(self) -> list[tuple[int, int]]:
        return [] if self._memory is None else [(self._memory.start, self._memory.nbytes)]

    def close(self) -> None:
        """The mapping goes when nothing refers to it any more."""
        shut(self, "_io", "_bind", "_session", "_memory")


Binder = Callable[[int, int], None]  # (tokens held, tokens new) -> None


def _bind_nothing(runner: OnnxRunner) -> Binder:
    return lambda past, new: None


def _bind_gemm(runner: OnnxRunner) -> Binder:
    """Prefix views in, the rows right after them out: bound anew as the context grows."""
    cache, memory, io = runner.artifact.cache, runner._memory, runner._io
    assert memory is not None
    rows = (cache.names(), memory.address, _DTYPES[cache.dtype], (cache.head_dim,))
    scales = (cache.scale_names(), memory.scale_address, np.float32, ())
    views: list[tuple[str, str, type, tuple[int, ...], int, int]] = []
    for names, address, dtype, shape in (rows, scales):
        row = math.prod(shape) * np.dtype(dtype).itemsize
        for i, name in enumerate(names):
            for g in range(cache.num_key_value_heads):
                start = address(i) + g * runner.capacity * row
                views.append((f"past.{name}.{g}", f"present.{name}.{g}", dtype, shape, row, start))

    def bind(past: int, new: int) -> None:
        for name, out, dtype, shape, row, start in views:
            io.bind_input(name, "cpu", 0, dtype, (past, *shape), start)
            io.bind_output(out, "cpu", 0, dtype, (new, *shape), start + past * row)

    return bind


def _bind_gqa(runner: OnnxRunner) -> Binder:
    """Past and present are the same memory, bound once; only the length changes."""
    cache, memory, io = runner.artifact.cache, runner._memory, runner._io
    assert memory is not None
    dtype = _DTYPES[cache.dtype]
    shape = (1, cache.num_key_value_heads, runner.capacity, cache.head_dim)
    outputs = [""] if cache.layout == "separate" else [".key", ".value"]
    for i, name in enumerate(cache.names()):
        io.bind_input(f"past.{name}", "cpu", 0, dtype, shape, memory.address(i))
        for suffix in outputs:
            io.bind_output(f"present.{name}{suffix}", "cpu", 0, dtype, shape, memory.address(i))
    total = np.zeros((), np.int32)
    io.bind_input("total_sequence_length", "cpu", 0, np.int32, (), total.ctypes.data)

    def bind(past: int, new: int) -> None:
        total[...] = past + new

    return bind


_BINDERS: dict[str, Callable[[OnnxRunner], Binder]] = {
    "gemm-prefix": _bind_gemm,
    "gqa-aliased": _bind_gqa,
    "full": _bind_nothing,
}
