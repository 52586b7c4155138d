"""Runs an ExecuTorch bundle with the SDK's Python runtime (which takes torch tensors)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_bench import malloc_chunks
from edgeqkv.artifact import Artifact, inside
from edgeqkv.errors import BundleError, MissingDependencyError, RunError, UnsupportedError
from edgeqkv.quiet import quiet
from edgeqkv.runner import check_tokens

FORMULATIONS = ("plain-bmm", "custom-sdpa", "full")

# The bench imports it first, to tell its memory and time from load's; it brings torch along.
RUNTIME = "executorch.extension.pybindings.portable_lib"


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
    with quiet():
        try:
            import torch
            from executorch.extension.pybindings import portable_lib

            if artifact.formulation == "custom-sdpa":
                import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401
        except ImportError as e:
            raise MissingDependencyError(
                f"running an ExecuTorch bundle needs {e.name}; pip install 'edgeqkv[executorch]'"
            ) from None
        torch.set_num_threads(threads)
        portable_lib._unsafe_reset_threadpool(threads)
        arena = artifact.details.get("cache_arena_bytes", {}).get(str(capacity))
        others = frozenset(malloc_chunks.find(arena)) if arena else frozenset()
        try:
            # Not runtime.Program: its arenas are sized for the largest method of the file.
            module = portable_lib._load_for_executorch(str(path))
            runner = ExecutorchRunner(artifact, module, capacity)
            runner.prefill(np.zeros(1, np.int64))
        except RuntimeError as e:
            reason = (str(e).strip().splitlines() or ["RuntimeError"])[0]
            raise BundleError(f"{path} cannot be loaded by executorch: {reason}") from None
    runner.reset()
    if arena:
        found = malloc_chunks.find(arena, others)
        runner._regions = [(found[0], arena)] if len(found) == 1 else None
    return runner


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
        self._regions: list[tuple[int, int]] | None = None if artifact.cache.names() else []

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
        ids = np.array([token], np.int64)
        check_tokens(self, ids)
        return self._step(ids)

    def cache_regions(self) -> list[tuple[int, int]] | None:
        return self._regions

    def close(self) -> None:
        self._module = None
