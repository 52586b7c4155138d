"""The one way to run a bundle: a protocol, and ``open_runner`` that picks by manifest.

Runners live in device_bench and register under the entry point group ``edgeqkv.runners``, so
that ``export`` can verify what it wrote without importing the package that measures it.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeqkv.artifact import Artifact, read_artifact
from edgeqkv.errors import RunError, UnsupportedError


class Runner(Protocol):
    """A loaded bundle: one sequence, batch 1. Logits are [vocab_size] float32, of the last token.

    engine: what executes, e.g. ``onnxruntime``; a reference interpreter says so in its name.
    interpreted: True when timings say nothing about the real runtime (numbers only).
    capacity: tokens of context this runner can hold. position: tokens it holds now.
    """

    artifact: Artifact
    engine: str
    interpreted: bool
    capacity: int
    position: int

    def reset(self) -> None:
        """Forget the sequence; the next token is at position 0."""

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append ids [S] and return the logits of the last one. Chunks internally."""
        ...

    def decode(self, token: int) -> NDArray[np.float32]:
        """Append one token and return its logits."""
        ...

    def cache_regions(self) -> list[tuple[int, int]] | None:
        """(address, nbytes) of the memory that is the cache and nothing else, reserved in full.

        None where the runtime does not let anyone know.
        """
        ...

    def close(self) -> None:
        """Let go of program and cache. Again: nothing. Any other method then raises RunError."""


def open_runner(bundle: str | Path, *, threads: int = 1, capacity: int | None = None) -> Runner:
    """Load a bundle with the runner of its backend.

    ``capacity``: context to allocate for; default the bundle's. A static bundle loads the smallest
    of its capacities that holds it.

    Raises:
        BundleError, UnsupportedError, MissingDependencyError.
    """
    artifact = read_artifact(Path(bundle))
    return load_runner(artifact, Path(bundle), threads=threads, capacity=capacity)


def load_runner(
    artifact: Artifact, bundle: Path, *, threads: int = 1, capacity: int | None = None
) -> Runner:
    """:func:`open_runner` for a manifest that was read already: nothing is hashed again."""
    entry = runner_entry(artifact, bundle)
    if threads < 1:
        raise RunError(f"threads is {threads}; it must be 1 or more")
    fitting = [c for c in artifact.capacities if c >= (capacity or artifact.cache.capacity)]
    if not fitting or (capacity is not None and capacity < 1):
        raise RunError(
            f"{bundle}: context {capacity} does not fit; allowed: 1 to {artifact.cache.capacity}"
        )
    chosen = fitting[0] if artifact.cache_mode == "static" else capacity or fitting[0]
    runner: Runner = entry.load()(artifact, bundle, threads=threads, capacity=chosen)
    return runner


def runner_entry(artifact: Artifact, bundle: Path) -> EntryPoint:
    """The entry point of the backend's ``load``; UnsupportedError where none is installed."""
    found = _entries()
    if artifact.backend not in found:
        raise UnsupportedError(
            f"{bundle}: no runner for backend {artifact.backend!r}; installed: {', '.join(sorted(found))}"
        )
    return found[artifact.backend]


@functools.cache  # a scan of every installed package, which has no place in a timed load
def _entries() -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group="edgeqkv.runners")}


def shut(runner: Runner, *held: str) -> None:
    """The close() of a runner: let go of the attributes ``held``; every method then says so."""

    def refuse(*_: object) -> NoReturn:
        raise RunError("the runner is closed; open the bundle again with open_runner")

    for method in ("reset", "prefill", "decode", "cache_regions"):
        setattr(runner, method, refuse)
    for name in held:
        setattr(runner, name, None)


def check_tokens(runner: Runner, ids: NDArray[np.int64]) -> None:
    """Every runner calls this before it touches its cache.

    Raises:
        RunError: no tokens, a token id the model has no embedding for, or a context overflow.
    """
    if ids.ndim != 1:
        raise RunError(f"token ids have shape {list(ids.shape)}; give one sequence, [S]")
    if ids.size == 0:
        raise RunError("the prompt has no tokens; give at least 1")
    vocab = runner.artifact.model.vocab_size
    if not np.issubdtype(ids.dtype, np.integer):
        raise RunError(f"token ids are {ids.dtype}; they must be integers")
    if (bad := ids[(ids < 0) | (ids >= vocab)]).size:
        raise RunError(f"token id {bad[0]} is outside the vocabulary; allowed: 0 to {vocab - 1}")
    if runner.position + ids.size > runner.capacity:
        raise RunError(
            f"context overflow: {runner.position} tokens held + {ids.size} new exceed the context of "
            f"{runner.capacity}; shorten the prompt or export with a larger --max-context"
        )
