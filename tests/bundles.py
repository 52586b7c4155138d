"""Bundles without the pipeline: lower a decoder with one backend and write its manifest."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from edgeqkv.artifact import MANIFEST, Artifact, file_entry
from edgeqkv.cache import cache_spec
from edgeqkv.model import Decoder
from export.lowering import Backend, Request


def make_bundle(
    backend: str,
    decoder: Decoder,
    directory: Path,
    *,
    layout: str = "auto",
    dtype: str = "fp32",
    capacity: int | None = None,
    weights: str = "fp32",
    **options: str,
) -> tuple[Artifact, Path]:
    """Lower ``decoder`` into ``directory`` (created) as the pipeline would; golden vectors left out."""
    to: Backend = importlib.import_module(f"export.backends.to_{backend}")  # type: ignore[assignment]
    cache = cache_spec(decoder.spec, layout=layout, dtype=dtype, capacity=capacity)
    request = Request(decoder.spec, cache, weights, options)
    to.check(request)
    directory.mkdir(parents=True, exist_ok=True)
    lowered = to.lower(decoder, request, directory)
    files = {
        path.relative_to(directory).as_posix(): file_entry(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    artifact = Artifact(
        backend=backend,
        entry=lowered.entry,
        model=decoder.spec,
        cache=cache,
        cache_mode=lowered.cache_mode,
        formulation=lowered.formulation,
        weights=weights,
        capacities=lowered.capacities,
        prefill_chunk=lowered.prefill_chunk,
        files=files,
        tools=lowered.tools,
        details=lowered.details,
    )
    (directory / MANIFEST).write_text(json.dumps(artifact.to_dict(), indent=2))
    return artifact, directory
