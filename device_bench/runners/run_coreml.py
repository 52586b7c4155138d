"""Run a Core ML bundle: Core ML itself on macOS 15 or newer, a reference interpreter elsewhere.

The macOS branch is written from coremltools 9.0's documented ``MLModel.predict`` and
``make_state`` and has not been run: no Mac was at hand. Both branches drive the same runner.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from device_bench.runners.mil_interpreter import MILInterpreter
from edgeqkv.artifact import Artifact, inside
from edgeqkv.errors import MissingDependencyError, RunError, UsageError
from edgeqkv.quiet import quiet
from edgeqkv.runner import check_tokens, shut

RUNTIME = "coremltools"  # the bench imports it first, to tell its memory and time from load's
UNITS_VARIABLE = "EDGEQKV_COREML_UNITS"
COMPUTE_UNITS = ("ALL", "CPU_AND_NE", "CPU_AND_GPU", "CPU_ONLY")


class Model(Protocol):
    """The part of ``coremltools.models.MLModel`` that a runner needs."""

    def make_state(self) -> Any: ...

    def predict(self, data: Any, state: Any = None) -> Any: ...


class CoreMLRunner:
    """See ``edgeqkv.runner.Runner``.

    A model that is not causal has no cache: its tokens are kept, and each call computes the whole
    sequence again.
    """

    def __init__(self, artifact: Artifact, model: Model, engine: str, *, interpreted: bool) -> None:
        self.artifact, self.model = artifact, model
        self.engine, self.interpreted = engine, interpreted
        self.capacity = artifact.cache.capacity
        self.stateful = artifact.cache_mode != "none"
        self.reset()

    def reset(self) -> None:
        """Start over with a fresh, zeroed state: no row of the last sequence survives."""
        self.position = 0
        self.ids = np.zeros(0, np.int32)
        self.state = self.model.make_state() if self.stateful else None

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        ids = np.asarray(ids)
        check_tokens(self, ids)
        if not self.stateful:
            self.ids = np.concatenate([self.ids, ids.astype(np.int32)])
            self.position = self.ids.size
            return self._predict(self.ids, 0)
        chunk = self.artifact.prefill_chunk
        for part in np.split(ids, range(chunk, ids.size, chunk)):
            logits = self._predict(part, self.position)
            self.position += part.size
        return logits

    def decode(self, token: int) -> NDArray[np.float32]:
        return self.prefill(np.array([token]))

    def _predict(self, ids: NDArray[Any], start: int) -> NDArray[np.float32]:
        feeds = {
            "input_ids": ids.astype(np.int32)[None],
            "positions": np.arange(start, start + ids.size, dtype=np.int32),
        }
        out = self.model.predict(feeds, self.state)["logits"]
        return np.asarray(out, np.float32).reshape(-1)

    def cache_regions(self) -> None:
        """Core ML does not say where a state lives."""
        return

    def close(self) -> None:
        shut(self, "state", "model")


def load(artifact: Artifact, directory: Path, *, threads: int, capacity: int) -> CoreMLRunner:
    """Load ``directory``'s package. ``capacity`` is the bundle's only one.

    ``threads`` is not used: Core ML chooses its own, and numpy's matmuls follow the BLAS settings.
    ``EDGEQKV_COREML_UNITS`` picks the compute units on macOS (default ALL).

    Raises:
        MissingDependencyError, BundleError; RunError when Core ML cannot load the program.
    """
    package = inside(directory, artifact.entry)
    if _has_core_ml():
        model = _load_core_ml(package, stateful=artifact.cache_mode != "none")
        return CoreMLRunner(artifact, model, "coreml", interpreted=False)
    interpreter = MILInterpreter(package)
    return CoreMLRunner(artifact, interpreter, "coreml-interpreter", interpreted=True)


def _has_core_ml() -> bool:
    """States need macOS 15."""
    return platform.system() == "Darwin" and int(platform.mac_ver()[0].split(".")[0] or 0) >= 15


def _load_core_ml(package: Path, *, stateful: bool) -> Model:
    units = os.environ.get(UNITS_VARIABLE, "ALL")
    if units not in COMPUTE_UNITS:
        raise UsageError(f"{UNITS_VARIABLE} is {units!r}; allowed: {', '.join(COMPUTE_UNITS)}")
    try:
        import coremltools as ct
    except ImportError:
        raise MissingDependencyError(
            "coremltools is not installed; pip install 'edgeqkv[coreml]'"
        ) from None
    try:
        with quiet():
            model: Model = ct.models.MLModel(str(package), compute_units=ct.ComputeUnit[units])
            # MLModel keeps a compile or load error to itself until the model is used.
            if stateful:
                model.make_state()
    except Exception as e:
        # Some stateful programs load for CPU_AND_GPU and not for ALL (coremltools#2325).
        raise RunError(
            f"Core ML cannot load {package} for {units}: {e}; try {UNITS_VARIABLE}=CPU_AND_GPU"
        ) from None
    return model
