"""What an artifact really holds, read from its own file and not from the manifest."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CacheTensor:
    """One cache tensor that the program declares. ``layer`` is None when its name does not say.

    ``elements_per_token``: elements of the tensor that one token of context takes.
    ``role``: what the graph reads it as: ``kv`` (both), ``key``, ``value`` or ``?``;
        ``scale`` for the scales of an int8 cache, a tensor of their own.
    """

    name: str
    layer: int | None
    role: str
    dtype: str
    shape: tuple[int | str, ...]
    elements_per_token: int
    itemsize: int


@dataclasses.dataclass(frozen=True)
class ArtifactFacts:
    """Result of ``read_<backend>.read``.

    cache_copies: operations that copy or duplicate the cache on a step, by name, each a defect.
    duplicate_weight_bytes: bytes of constants that the file stores more than once.
    warnings: known hazards on real devices (lint), each one line.
    """

    cache_tensors: tuple[CacheTensor, ...]
    cache_copies: tuple[str, ...]
    duplicate_weight_bytes: int
    weight_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Declared by the artifact: what its own cache tensors cost per token."""
        return sum(t.elements_per_token * t.itemsize for t in self.cache_tensors)
