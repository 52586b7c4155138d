"""The manifest of a baseline: an ordinary bundle whose backend is another tool."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edgeqkv.artifact import MANIFEST, TOKENIZER, Artifact, file_entry, write_manifest
from edgeqkv.cache import cache_spec
from edgeqkv.quant import Quantisation, QuantRecipe
from edgeqkv.spec import ModelSpec

FP32 = QuantRecipe()


def finish(
    folder: Path,
    model_dir: Path,
    *,
    backend: str,
    entry: str,
    converted: ModelSpec,
    original: ModelSpec,
    cache_dtype: str,
    cache_mode: str,
    formulation: str,
    capacities: Sequence[int],
    tools: Sequence[str],
    details: Mapping[str, Any],
    recipe: QuantRecipe = FP32,
) -> Artifact:
    """Write ``manifest.json`` over what ``folder`` holds. ``converted`` is the model that runs.

    Golden vectors are left out: they are the exporter's. ``details.baseline_of`` names the variant
    whose weights these are. recipe: what those are stored as.
    """
    tokenizer = model_dir / TOKENIZER
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, folder / TOKENIZER)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    artifact = Artifact(
        backend=backend,
        name=model_dir.resolve().name,
        entry=entry,
        model=converted,
        cache=cache_spec(converted, layout="separate", dtype=cache_dtype),
        cache_mode=cache_mode,
        formulation=formulation,
        weights=recipe.label,
        quantisation=Quantisation(recipe, "none" if recipe == FP32 else "rtn"),
        capacities=tuple(capacities),
        prefill_chunk=converted.max_position_embeddings,
        files={p.relative_to(folder).as_posix(): file_entry(p) for p in files},
        tools={name: version(name) for name in ("edgeqkv", *tools)},
        details={"baseline_of": original.label, **details},
    )
    write_manifest(folder, artifact)
    return artifact
