"""CacheSpec: the key/value cache of a model, derived from ModelSpec alone. No torch here.

The formula everything else is checked against:
``bytes_per_token = layers * tensors_per_layer * num_key_value_heads * (head_dim * itemsize + scale)``,
where scale is 4 for int8, whose rows carry one float32 scale per token and head, else 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from edgeqkv.errors import SpecError
from edgeqkv.spec import MOST, ModelSpec, check_keys

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
# Bytes of the scale that one row [head_dim] of one token carries: row ~ int8 row * scale.
SCALE_BYTES = {"fp32": 0, "fp16": 0, "int8": 4}
LAYOUTS = ("none", "shared", "separate")
LAYOUT_CHOICES = ("auto", "shared", "separate")


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """How many cache tensors there are, of what size.

    ``layout``: ``shared`` one tensor per layer read as key and as value; ``separate`` two;
    ``none`` for a model that is not causal and keeps no cache. ``capacity``: tokens it can hold.
    ``dtype`` int8 is symmetric, q in [-127, 127], with scale = max|row| / 127 of every token and
    head; with ``shared`` the one scale serves both roles.
    """

    layout: str
    num_layers: int
    num_key_value_heads: int
    head_dim: int
    capacity: int
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise SpecError(f"cache layout is {self.layout!r}; allowed: {', '.join(LAYOUTS)}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise SpecError(f"cache dtype is {self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
        for name in ("num_layers", "num_key_value_heads", "head_dim", "capacity"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"cache {name} is {value!r}; it must be a positive integer")
        if self.num_layers > MOST:
            raise SpecError(f"cache num_layers is {self.num_layers}; it must be {MOST} or less")

    @property
    def tensors_per_layer(self) -> int:
        return {"none": 0, "shared": 1, "separate": 2}[self.layout]

    @property
    def roles(self) -> tuple[str, ...]:
        """What the tensors of one layer are called: ("kv",), ("key", "value") or ()."""
        return {"none": (), "shared": ("kv",), "separate": ("key", "value")}[self.layout]

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def scale_itemsize(self) -> int:
        """Bytes of one scale; 0 where the dtype needs none."""
        return SCALE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of context costs, all layers together, scales included."""
        row = self.num_key_value_heads * (self.head_dim * self.itemsize + self.scale_itemsize)
        return self.num_layers * self.tensors_per_layer * row

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache at capacity."""
        return self.bytes_per_token * self.capacity

    def tokens_in(self, budget_bytes: int) -> int | None:
        """Context that fits in a budget; None where there is no cache to limit it."""
        return budget_bytes // self.bytes_per_token if self.bytes_per_token else None

    def names(self) -> list[str]:
        """Tensor names in layer order: ``cache.0.kv`` or ``cache.0.key``, ``cache.0.value``."""
        return [f"cache.{i}.{role}" for i in range(self.num_layers) for role in self.roles]

    def scale_names(self) -> list[str]:
        """``cache.0.kv.scale``, ... beside :meth:`names`; empty where the dtype needs no scale."""
        return [f"{name}.scale" for name in self.names()] if self.scale_itemsize else []

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CacheSpec:
        fields = frozenset(f.name for f in dataclasses.fields(CacheSpec))
        check_keys("cache", data, fields, fields)
        return CacheSpec(**data)


def cache_spec(
    model: ModelSpec, *, layout: str = "auto", dtype: str = "fp32", capacity: int | None = None
) -> CacheSpec:
    """The cache that ``model`` needs.

    ``auto`` is one tensor per layer exactly when key and value are the same numbers at read time.

    Raises:
        SpecError: ``shared`` for a model whose key and value differ; a capacity above the
            model's learned positions; an unknown layout or dtype.
    """
    if layout not in LAYOUT_CHOICES:
        raise SpecError(f"cache layout is {layout!r}; allowed: {', '.join(LAYOUT_CHOICES)}")
    if layout == "shared" and not model.key_is_value:
        raise SpecError(
            f"cache layout shared is impossible for {model.label}: its key and value are different "
            f"projections (qkv_sharing {model.qkv_sharing}); use auto or separate"
        )
    capacity = model.max_position_embeddings if capacity is None else capacity
    if capacity > model.max_position_embeddings:
        raise SpecError(
            f"max context {capacity} exceeds the model's learned positions; "
            f"allowed: 1 to {model.max_position_embeddings}"
        )
    if not model.is_causal:
        layout = "none"
    elif layout == "auto":
        layout = "shared" if model.key_is_value else "separate"
    return CacheSpec(
        layout=layout,
        num_layers=model.num_hidden_layers,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        capacity=capacity,
        dtype=dtype,
    )
