"""Read other people's checkpoints. One module per source format, tried in order."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from edgeqkv.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Imported:
    """A checkpoint in our terms. ``inferences``: every fact that had to be guessed, one line each."""

    spec: ModelSpec
    state: dict[str, Tensor]
    source_format: str
    inferences: tuple[str, ...]


def read_checkpoint(source: str) -> Imported:
    """Detect the format of ``source`` (a path or ``hf:REPO[/FILE]``) and read it."""
    raise NotImplementedError
