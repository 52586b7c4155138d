"""What a backend is asked for and what it gives back: the types of ``backends/to_*``."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from edgeqkv.cache import CacheSpec
from edgeqkv.model import Decoder
from edgeqkv.quant import QuantRecipe
from edgeqkv.spec import ModelSpec
from export.quantise import QuantTensor


@dataclasses.dataclass(frozen=True)
class Request:
    """One export. ``options``: the backend's own flags, e.g. {"et_attention": "plain"}.

    tensors: module name -> integers, of every module that the recipe stores as integers; the
    decoder that is lowered holds the same numbers as float32, a tied head those of ``wte``. Empty
    when ``check`` is called, which must judge by ``recipe`` alone.
    """

    model: ModelSpec
    cache: CacheSpec
    recipe: QuantRecipe = dataclasses.field(default_factory=QuantRecipe)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, QuantTensor] = dataclasses.field(default_factory=dict)

    @property
    def weights(self) -> str:
        """The recipe's short name."""
        return self.recipe.label


@dataclasses.dataclass(frozen=True)
class Lowered:
    """What a backend wrote; the fields go into the manifest (see edgeqkv/artifact.py)."""

    entry: str
    cache_mode: str
    formulation: str
    capacities: tuple[int, ...]
    prefill_chunk: int
    tools: Mapping[str, str]
    details: Mapping[str, Any]


def shared_copy(decoder: Decoder) -> Decoder:
    """A copy whose modules may be replaced; every tensor is shared with the original."""
    tensors = (*decoder.parameters(), *decoder.buffers())
    return copy.deepcopy(decoder, {id(tensor): tensor for tensor in tensors})


class Backend(Protocol):
    """The two functions of a ``to_<backend>`` module."""

    def check(self, request: Request) -> None: ...

    def lower(self, decoder: Decoder, request: Request, directory: Path) -> Lowered: ...
