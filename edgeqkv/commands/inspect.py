"""``edgeqkv inspect``: what a model is and what its cache costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from edgeqkv.spec import ModelSpec

BUDGET_BYTES = 256 * 2**20


def run(
    path: Annotated[
        str | None,
        typer.Argument(metavar="PATH", help="Checkpoint, hf:..., MODEL_DIR or bundle."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Instead of PATH: a shape of the papers, e.g. 300m-q-mqa.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show spec, parameters, cache layout, bytes per token and the context that fits in 256 MiB.

    Example: edgeqkv inspect MODEL_DIR
    """
    from edgeqkv.console import print_json
    from edgeqkv.errors import UsageError

    if (path is None) == (preset is None):
        raise UsageError("give either PATH or --preset NAME")
    spec, about = _preset(preset) if preset is not None else _read(str(path))
    data = {
        **about,
        "label": spec.label,
        "parameters": spec.num_parameters(),
        "cache": {layout: _cache(spec, layout) for layout in ("auto", "separate")},
        "spec": spec.to_dict(),
    }
    if as_json:
        print_json(data)
    else:
        _print(spec, data)


def _preset(name: str) -> tuple[ModelSpec, dict[str, Any]]:
    from edgeqkv import presets
    from edgeqkv.errors import of_flag

    with of_flag("--preset"):
        return presets.preset(name), {"source": name, "kind": "preset"}


def _read(source: str) -> tuple[ModelSpec, dict[str, Any]]:
    """The spec and what is known beside it. Only a checkpoint needs torch."""
    from edgeqkv.artifact import MANIFEST, read_artifact
    from edgeqkv.config import CONFIG, read_config
    from edgeqkv.errors import CheckpointError

    path = Path(source)
    about: dict[str, Any] = {"source": source}
    if (path / MANIFEST).is_file():
        artifact = read_artifact(path)
        bundle = {
            "backend": artifact.backend,
            "formulation": artifact.formulation,
            "weights": artifact.weights,
            "stored_weights": artifact.stored_weights,
            "cache": artifact.cache.to_dict(),
            "cache_mode": artifact.cache_mode,
            "bytes_per_token": artifact.cache.bytes_per_token,
            "nbytes": artifact.nbytes,
        }
        return artifact.model, about | {"kind": "bundle", "bundle": bundle}
    if (path / CONFIG).is_file():
        spec, provenance = read_config(path)
        return spec, about | {"kind": "MODEL_DIR", "provenance": provenance}
    if path.is_dir():
        raise CheckpointError(
            f"{source} is neither a MODEL_DIR (no {CONFIG}) nor a bundle (no {MANIFEST}); make them "
            "with `edgeqkv import` and `edgeqkv export`"
        )
    from edgeqkv.importers import read_checkpoint

    imported = read_checkpoint(source)
    provenance = {
        "source_format": imported.source_format,
        "inferences": list(imported.inferences),
    }
    return imported.spec, about | {"kind": "checkpoint", "provenance": provenance}


def _cache(spec: ModelSpec, layout: str) -> dict[str, Any]:
    from edgeqkv.cache import DTYPE_BYTES, cache_spec

    caches = {dtype: cache_spec(spec, layout=layout, dtype=dtype) for dtype in DTYPE_BYTES}
    first = next(iter(caches.values()))
    return {
        "layout": first.layout,
        "tensors_per_layer": first.tensors_per_layer,
        "bytes_per_token": {dtype: c.bytes_per_token for dtype, c in caches.items()},
        "tokens_in_256_MiB": {dtype: c.tokens_in(BUDGET_BYTES) for dtype, c in caches.items()},
        "nbytes_at_max_context": {dtype: c.nbytes for dtype, c in caches.items()},
    }


def _print(spec: ModelSpec, data: dict[str, Any]) -> None:
    from edgeqkv.console import human_bytes, print_table

    print(f"{data['source']} ({data['kind']}): {spec.label}, {data['parameters']:,} parameters")
    provenance = data.get("provenance", {})
    if provenance.get("source_format"):
        print(f"from {provenance['source_format']}")
    for inference in provenance.get("inferences", []):
        print(f"inferred: {inference}")
    print()
    rows = [(key, value) for key, value in data["spec"].items() if value is not None]
    half = (len(rows) + 1) // 2
    pairs = [(*a, *b) for a, b in zip(rows[:half], [*rows[half:], ("", "")], strict=False)]
    print_table(("spec", "", "", ""), [tuple(_cell(c) for c in pair) for pair in pairs])
    print()
    if not spec.is_causal:
        print("cache: none, the model is not causal")
        return
    print_table(
        ("cache", "layout", "per layer", "dtype", "bytes/token", "at max context", "in 256 MiB"),
        [
            (
                asked,
                c["layout"],
                f"{c['tensors_per_layer']} x {spec.num_key_value_heads} x {spec.head_dim}",
                dtype,
                f"{c['bytes_per_token'][dtype]:,}",
                f"{human_bytes(c['nbytes_at_max_context'][dtype])} at {spec.max_position_embeddings:,}",
                f"{c['tokens_in_256_MiB'][dtype]:,} tokens",
            )
            for asked, c in data["cache"].items()
            for dtype in c["bytes_per_token"]
        ],
    )
    if bundle := data.get("bundle"):
        cache = bundle["cache"]
        print(
            f"\nbundle: {bundle['backend']} ({bundle['formulation']}), weights {bundle['stored_weights']}, "
            f"{human_bytes(bundle['nbytes'])}; cache {cache['layout']} {cache['dtype']}, "
            f"{bundle['cache_mode']}, {bundle['bytes_per_token']:,} bytes/token, "
            f"up to {cache['capacity']:,} tokens"
        )


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
