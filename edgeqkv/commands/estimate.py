"""``edgeqkv estimate``: what fits where, before exporting anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer


def run(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL_DIR", help="Or give --preset.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A shape of the papers.")] = None,
    context: Annotated[str, typer.Option(help="Comma list of tokens.")] = "2048,32768",
    budget: Annotated[str | None, typer.Option(help="Memory for weights and cache.")] = None,
    weights: Annotated[str, typer.Option(help="fp32, fp16, int8 or int4.")] = "fp16",
    cache_dtype: Annotated[str, typer.Option(help="fp32, fp16 or int8.")] = "fp16",
    groups: Annotated[
        int | None, typer.Option(help="Key/value heads of the GQA rows.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Weights, cache and the context that fits, for every variant and layout of one shape.

    Example: edgeqkv estimate --preset 1.2b-q-mqa --budget 4GiB --context 2048,32768
    """
    from edgeqkv.cache import cache_spec
    from edgeqkv.config import read_config
    from edgeqkv.console import human_bytes, print_json, print_table
    from edgeqkv.errors import UsageError, of_flag
    from edgeqkv.estimate import default_groups, estimate, parse_bytes
    from edgeqkv.presets import preset as find_preset

    if (model is None) == (preset is None):
        raise UsageError("give either a MODEL_DIR or --preset NAME")
    with of_flag("--preset"):
        shape = read_config(model)[0] if model is not None else find_preset(preset or "")
    heads = shape.num_attention_heads
    if groups is not None and heads % groups:
        raise UsageError(f"--groups is {groups}; it must divide the model's {heads} query heads")
    with of_flag("--cache-dtype"):
        cache_spec(shape, dtype=cache_dtype)
    with of_flag("--budget"):
        budget_bytes = None if budget is None else parse_bytes(budget)
    try:
        contexts = [int(c) for c in context.split(",")]
    except ValueError:
        raise UsageError(f"--context is {context!r}; example: 2048,32768") from None
    rows = estimate(
        shape,
        contexts,
        budget_bytes=budget_bytes,
        weights=weights,
        cache_dtype=cache_dtype,
        groups=groups or default_groups(shape),
    )
    if as_json:
        print_json([dataclasses.asdict(r) | {"asked": r.variant == shape.label} for r in rows])
        return
    columns = ["variant", "layout", "parameters", "weights", "bytes\n/token", "smaller\nthan QKV"]
    columns += [f"cache\n@{c}" for c in contexts] + ([f"tokens\nin {budget}"] if budget else [])
    cells: list[list[object]] = [
        [
            r.variant + "*" * (r.variant == shape.label),
            r.layout,
            f"{r.parameters:,}",
            human_bytes(r.weight_bytes),
            f"{r.bytes_per_token:,}",
            f"{r.ratio:g}x",
            *(human_bytes(r.cache_bytes[c]) for c in contexts),
            *([f"{r.max_context:,}"] if budget else []),
        ]
        for r in rows
    ]
    print_table(columns, cells)
    if any(r.variant == shape.label for r in rows):
        print(f"* {shape.label}: the variant of {preset or model}; the others have the same shape.")
    print("smaller than QKV: the cache, against QKV's with full heads and two tensors per layer.")
    if budget:
        print(f"tokens in {budget}: the context whose cache fits into it beside the weights.")
    if max(*contexts, *(r.max_context or 0 for r in rows)) > shape.max_position_embeddings:
        print(
            f"The model has {shape.max_position_embeddings} learned positions: figures beyond are "
            "sizes, not a trained context."
        )
