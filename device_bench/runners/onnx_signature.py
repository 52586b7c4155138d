"""What a program has to take and give for its manifest to be true; the runner binds by the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeqkv.artifact import Artifact
from edgeqkv.errors import BundleError

_TYPES = {"fp32": "tensor(float)", "fp16": "tensor(float16)", "int8": "tensor(int8)"}
Signature = dict[str, tuple[str, tuple[int | None, ...]]]  # name -> type, shape; None: any length


def _cache_inputs(artifact: Artifact) -> Signature:
    cache, heads = artifact.cache, artifact.cache.num_key_value_heads
    kind = _TYPES[cache.dtype]
    rows: Signature
    match artifact.formulation:
        case "gemm-prefix":
            rows = {
                f"past.{name}.{g}": (kind, (None, cache.head_dim))
                for name in cache.names()
                for g in range(heads)
            }
            scales: Signature = {
                f"past.{name}.{g}": (_TYPES["fp32"], (None,))
                for name in cache.scale_names()
                for g in range(heads)
            }
            return rows | scales
        case "gqa-aliased":
            rows = {f"past.{n}": (kind, (1, heads, None, cache.head_dim)) for n in cache.names()}
            return rows | {"total_sequence_length": ("tensor(int32)", ())}
        case "optimum":
            names = [f"{i}.{role}" for i in range(cache.num_layers) for role in ("key", "value")]
            shape = (None, heads, None, cache.head_dim)
            rows = {f"past_key_values.{name}": (kind, shape) for name in names}
            ids = ("tensor(int64)", (None, None))
            return rows | {"attention_mask": ids, "position_ids": ids}
    return {}


def check_signature(session: Any, artifact: Artifact, path: Path) -> None:
    """Compare the program at ``path`` with what the manifest makes of it, before anything is bound.

    Raises:
        BundleError: an input is missing, unknown, or of another type or shape; or other logits.
    """
    ids = ("tensor(int64)", (None, None))
    _compare("input", {"input_ids": ids} | _cache_inputs(artifact), session.get_inputs(), path)
    logits = ("tensor(float)", (None, None, artifact.model.vocab_size))
    given = [o for o in session.get_outputs() if o.name == "logits"]
    _compare("output", {"logits": logits}, given, path)


def _compare(what: str, expected: Signature, nodes: Any, path: Path) -> None:
    found: Signature = {
        n.name: (n.type, tuple(d if isinstance(d, int) else None for d in n.shape)) for n in nodes
    }
    for name in sorted(expected.keys() | found.keys()):
        wanted, given = expected.get(name), found.get(name)
        if wanted is None or given is None or not _fits(wanted, given):
            raise BundleError(
                f"{path} does not match its manifest: {what} {name} should be {_text(wanted)}, "
                f"found {_text(given)}; the bundle was edited, export it again"
            )


def _fits(wanted: tuple[str, tuple[int | None, ...]], given: tuple[str, tuple[Any, ...]]) -> bool:
    (kind, shape), (given_kind, given_shape) = wanted, given
    same = zip(shape, given_shape, strict=False)
    return (
        kind == given_kind
        and len(shape) == len(given_shape)
        and all(a is None or b is None or a == b for a, b in same)
    )


def _text(entry: tuple[str, tuple[int | None, ...]] | None) -> str:
    if entry is None:
        return "absent"
    return f"{entry[0]} [{', '.join('?' if d is None else str(d) for d in entry[1])}]"
