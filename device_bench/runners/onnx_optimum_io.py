"""Runs an ONNX bundle that has optimum's inputs and outputs (``export --io optimum``).

The runtime makes every layer's key and value anew on each step; this runner only hands them back.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeqkv.artifact import Artifact
from edgeqkv.runner import check_tokens, shut

FORMULATION = "optimum"


class OptimumIoRunner:
    """See ``edgeqkv.runner.Runner``. ``session``: an onnxruntime.InferenceSession."""

    engine = "onnxruntime"
    interpreted = False

    def __init__(self, artifact: Artifact, session: Any, capacity: int) -> None:
        self.artifact, self.capacity = artifact, capacity
        self._session = session
        self._io = session.io_binding()
        names = [i.name for i in session.get_inputs() if i.name.startswith("past_key_values.")]
        self._names = [name.removeprefix("past_key_values.") for name in names]
        self.reset()

    def reset(self) -> None:
        cache = self.artifact.cache
        self.position = 0
        self._held: list[Any] = []
        empty = np.empty((1, cache.num_key_value_heads, 0, cache.head_dim), np.float32)
        for name in self._names:
            self._io.bind_cpu_input(f"past_key_values.{name}", empty)
        self._io.clear_binding_outputs()

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        ids = np.asarray(ids)
        check_tokens(self, ids)
        chunk = self.artifact.prefill_chunk
        for i in range(0, ids.size, chunk):
            logits = self._step(ids[i : i + chunk])
        return logits

    def decode(self, token: int) -> NDArray[np.float32]:
        ids = np.array([token])
        check_tokens(self, ids)
        return self._step(ids)

    def _step(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        total = self.position + ids.size
        feeds = {
            "input_ids": np.ascontiguousarray(ids, np.int64)[None],
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(self.position, total)[None],
        }
        for name, array in feeds.items():
            self._io.bind_cpu_input(name, array)
        for name in ("logits", *(f"present.{n}" for n in self._names)):
            self._io.bind_output(name, "cpu")
        self._session.run_with_iobinding(self._io)
        logits, *self._held = self._io.get_outputs()
        for name, value in zip(self._names, self._held, strict=True):
            self._io.bind_ortvalue_input(f"past_key_values.{name}", value)
        self.position = total
        last: NDArray[np.float32] = logits.numpy()[0, -1].copy()
        return last

    def cache_regions(self) -> list[tuple[int, int]]:
        """The keys and values held between steps; a step has the next ones beside them."""
        return [(v.data_ptr(), 4 * math.prod(v.shape())) for v in self._held]

    def close(self) -> None:
        shut(self, "_held", "_io", "_session")
