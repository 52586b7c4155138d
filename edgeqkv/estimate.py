"""What fits where, by formula, before anything is exported. No torch here.

Sources: cache bytes from :mod:`edgeqkv.cache`; weight bytes per parameter from the number format,
a group of 32 sharing one fp16 scale for int8 and int4.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from edgeqkv.cache import cache_spec
from edgeqkv.errors import UsageError
from edgeqkv.spec import ModelSpec

GROUP_SIZE = 32
WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1 + 2 / GROUP_SIZE, "int4": 0.5 + 2 / GROUP_SIZE}
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One variant and layout of a shape. ``cache_bytes``: context -> bytes of the whole cache.

    ratio: how many times smaller the cache is than QKV's with two tensors per layer.
    max_context: tokens that fit beside the weights in the budget; 0 when the weights alone do not;
    it may exceed ``positions``, the learned positions, beyond which the model was not trained.
    """

    variant: str
    layout: str
    parameters: int
    weight_bytes: int
    bytes_per_token: int
    ratio: float
    cache_bytes: dict[int, int]
    max_context: int | None
    positions: int


def parse_bytes(text: str) -> int:
    """``512MiB``, ``1.5GB``, ``4096`` -> bytes.

    Raises:
        UsageError: not a number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS:
        raise UsageError(f"size is {text!r}; examples: 512MiB, 1.5GB, 268435456")
    return int(float(match[1]) * _UNITS[match[2]])


def variants_of(shape: ModelSpec, groups: int) -> Iterator[ModelSpec]:
    """The papers' variants of one shape: full heads, ``groups`` key/value heads, one head."""
    heads = shape.num_attention_heads
    pairs = [("none", heads), ("q=k", heads), ("k=v", heads), ("q=k=v", heads)]
    pairs += [(sharing, g) for g in (groups, 1) for sharing in ("none", "k=v")]
    for sharing, kv_heads in dict.fromkeys(pairs):
        if shape.query_mode != "projected" and sharing in ("q=k", "q=k=v"):
            continue
        yield dataclasses.replace(shape, qkv_sharing=sharing, num_key_value_heads=kv_heads)


def default_groups(shape: ModelSpec) -> int:
    """The model's own key/value heads when it groups them, else a quarter of its heads."""
    heads, own = shape.num_attention_heads, shape.num_key_value_heads
    if 1 < own < heads:
        return own
    return max(g for g in range(1, max(1, heads // 4) + 1) if heads % g == 0)


def estimate(
    shape: ModelSpec,
    contexts: list[int],
    *,
    budget_bytes: int | None = None,
    weights: str = "fp16",
    cache_dtype: str = "fp16",
    groups: int | None = None,
) -> list[Estimate]:
    """Every variant and legal layout of ``shape``.

    Raises:
        UsageError, SpecError: an unknown weight format, cache dtype, or groups that do not divide.
    """
    if weights not in WEIGHT_BYTES:
        raise UsageError(f"--weights is {weights!r}; allowed: {', '.join(WEIGHT_BYTES)}")
    if bad := [c for c in contexts if not 0 < c < 2**31]:
        raise UsageError(f"--context is {bad[0]}; allowed: 1 to {2**31 - 1}")
    baseline = dataclasses.replace(
        shape, qkv_sharing="none", num_key_value_heads=shape.num_attention_heads
    )
    most = cache_spec(baseline, layout="separate", dtype=cache_dtype).bytes_per_token
    found = []
    for model in variants_of(shape, default_groups(shape) if groups is None else groups):
        for layout in ("shared", "separate") if model.key_is_value else ("separate",):
            per_token = cache_spec(model, layout=layout, dtype=cache_dtype).bytes_per_token
            weight_bytes = round(model.num_parameters() * WEIGHT_BYTES[weights])
            room = None if budget_bytes is None else max(0, budget_bytes - weight_bytes)
            found.append(
                Estimate(
                    variant=model.label,
                    layout=layout,
                    parameters=model.num_parameters(),
                    weight_bytes=weight_bytes,
                    bytes_per_token=per_token,
                    ratio=most / per_token,
                    cache_bytes={c: c * per_token for c in contexts},
                    max_context=None if room is None else room // per_token,
                    positions=model.max_position_embeddings,
                )
            )
    return found
