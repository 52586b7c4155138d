"""Runs an ExecuTorch bundle with the SDK's Python runtime (which takes torch tensors)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_bench import malloc_chunks
from edgeqkv.artifact import Artifact, inside
from edgeqkv.errors import (
    BundleError,
    MissingDependencyError,
    RunError,
    UnsupportedError,
    first_line,
)
from edgeqkv.quant import GROUPED
from edgeqkv.quiet import quiet
from edgeqkv.runner import check_tokens, shut

_OTHER_TOKEN = np.ones(1, np.int64)  # than the one that load feeds: it leaves other rows

FORMULATIONS = ("plain-bmm", "custom-sdpa", "full")

# The bench imports these first, to tell their memory and time from load's. The extension needs the
# libraries that torch loads; the wrapper around it, portable_lib, would import the whole exporter.
RUNTIME = "torch executorch.extension.pybindings._C"


def load(artifact: Artifact, directory: Path, *, threads: int, capacity: int) -> ExecutorchRunner:
    """Load the method of ``capacity`` and run it once, which is when the runtime really loads it.

    Both thread pools are set for the whole process: ExecuTorch's (XNNPACK and its own kernels) and
    torch's, which the ``llama::`` operators of the Python runtime use.

    Raises:
        MissingDependencyError: no executorch. BundleError: the program cannot be loaded.
        UnsupportedError: a formulation this runner does not know.
    """
    if artifact.formulation not in FORMULATIONS:
        raise UnsupportedError(
            f"{directory}: formulation {artifact.formulation!r} is unknown to this runner; "
            f"allowed: {', '.join(FORMULATIONS)}"
        )
    path = inside(directory, artifact.entry)
    _check_header(path)
    with quiet():
        try:
            import torch
            from executorch.extension.pybindings import _C

            if artifact.formulation == "custom-sdpa":
                _load_custom_ops(torch)
            if artifact.quantisation.recipe.schemes & set(GROUPED):
                _load_quantised_kernels()
        except ImportError as e:
            raise MissingDependencyError(
                f"running an ExecuTorch bundle needs {e.name}; pip install 'edgeqkv[executorch]'"
            ) from None
        torch.set_num_threads(threads)
        _C._unsafe_reset_threadpool(threads)
        try:
            # Not runtime.Program: its arenas are sized for the largest method of the file.
            module = _C._load_for_executorch(str(path))
            runner = ExecutorchRunner(artifact, module, capacity)
            # The exporter plans the cache, and nothing else, into an arena of its own.
            arena = artifact.cache.bytes_per_token * capacity
            with malloc_chunks.fresh(arena) as blocks:
                runner.prefill(np.zeros(1, np.int64))
            if len(blocks) > 1:  # a packed weight as large as the arena: a step never writes it
                runner.reset()
                blocks = malloc_chunks.written(blocks, arena, lambda: runner.prefill(_OTHER_TOKEN))
            if arena:
                runner.regions = [(blocks[0], arena)] if len(blocks) == 1 else None
        except RuntimeError as e:
            raise BundleError(
                f"{path} cannot be loaded by executorch: {first_line(e)}; export the bundle again"
            ) from None
    runner.reset()
    return runner


def _check_header(path: Path) -> None:
    """The runtime ends the whole process over a file of another kind."""
    if not path.is_file():
        raise BundleError(f"{path} is no file; export the bundle again")
    with path.open("rb") as f:
        if f.read(6)[4:] != b"ET":  # the flatbuffer identifier ET12 at offset 4
            raise BundleError(f"{path} is not an ExecuTorch program; export the bundle again")


def _load_custom_ops(torch: Any) -> None:
    """Load the library of the ``llama::`` kernels; its Python module would import the exporter too."""
    from executorch.extension.llm import custom_ops

    (library,) = Path(custom_ops.__path__[0]).glob("*custom_ops_aot_lib.*")
    torch.ops.load_library(library)


def _load_quantised_kernels() -> None:
    """Register the lookups in quantised embeddings; their Python module would add torch's side too."""
    import executorch

    (library,) = Path(executorch.__path__[0], "lib").glob("*executorch_kernels_quantized.*")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class ExecutorchRunner:
    """See ``edgeqkv.runner.Runner``."""

    engine = "executorch"
    interpreted = False

    def __init__(self, artifact: Artifact, module: Any, capacity: int) -> None:
        import torch

        self.artifact, self.capacity, self.position = artifact, capacity, 0
        self._module: Any = module
        self._method = f"forward_{capacity}"
        self._tensor, self._arange = torch.from_numpy, torch.arange
        self.regions: list[tuple[int, int]] | None = []

    def _step(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        inputs = [self._tensor(ids[None])]
        if self.artifact.cache.names():
            inputs.append(self._arange(self.position, self.position + ids.size))
        logits: NDArray[np.float32] = self._module.run_method(self._method, inputs)[0].numpy()
        self.position += ids.size
        return logits.reshape(-1)

    def reset(self) -> None:
        """Rows of the old sequence stay in memory; each gets weight exactly 0 until overwritten."""
        self.position = 0

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        ids = np.ascontiguousarray(ids)
        if not self.artifact.cache.names():
            self.position = 0
        check_tokens(self, ids)
        ids = ids.astype(np.int64, copy=False)
        chunk = min(self.artifact.prefill_chunk, self.capacity)
        parts = [self._step(ids[i : i + chunk]) for i in range(0, ids.size, chunk)]
        return parts[-1]

    def decode(self, token: int) -> NDArray[np.float32]:
        if not self.artifact.cache.names():
            raise RunError(
                f"{self.artifact.model.label} is not causal: it has no decode; prefill the whole input"
            )
        ids = np.array([token])
        check_tokens(self, ids)
        return self._step(ids.astype(np.int64))

    def cache_regions(self) -> list[tuple[int, int]] | None:
        """The arena of the cache, told from the rest of the heap by its size (see malloc_chunks).

        None unless MALLOC_MMAP_THRESHOLD_ was set as the process started and the arena is as large.
        """
        return self.regions

    def close(self) -> None:
        shut(self, "_module", "regions")
