"""Bundles without the pipeline: lower a decoder with one backend and write its manifest."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

from edgeqkv.artifact import MANIFEST, Artifact, file_entry
from edgeqkv.cache import cache_spec
from edgeqkv.model import Decoder
from edgeqkv.quant import Quantisation, uniform
from export.lowering import Backend, Request, shared_copy
from export.quantise import apply_rounding, drop_floats, quantise


def make_bundle(
    backend: str,
    decoder: Decoder,
    directory: Path,
    *,
    layout: str = "auto",
    dtype: str = "fp32",
    capacity: int | None = None,
    weights: str = "fp32",
    group_size: int | None = None,
    **options: str,
) -> tuple[Artifact, Path]:
    """Lower ``decoder`` into ``directory`` (created) as the pipeline would; golden vectors left out.

    With quantised ``weights`` the decoder is rounded in place, so that it is the reference too.
    """
    to: Backend = importlib.import_module(f"export.backends.to_{backend}")  # type: ignore[assignment]
    cache = cache_spec(decoder.spec, layout=layout, dtype=dtype, capacity=capacity)
    recipe = uniform(weights, group_size)
    request = Request(decoder.spec, cache, recipe, options)
    to.check(request)
    tensors = quantise(decoder, recipe)
    apply_rounding(decoder, recipe, tensors)
    request = dataclasses.replace(request, tensors=tensors)
    directory.mkdir(parents=True, exist_ok=True)
    lowered_from = shared_copy(decoder)
    drop_floats(lowered_from, tensors)
    lowered = to.lower(lowered_from, request, directory)
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
        weights=recipe.label,
        quantisation=Quantisation(recipe, "rtn" if tensors else "none"),
        capacities=lowered.capacities,
        prefill_chunk=lowered.prefill_chunk,
        files=files,
        tools=lowered.tools,
        details=lowered.details,
    )
    (directory / MANIFEST).write_text(json.dumps(artifact.to_dict(), indent=2))
    return artifact, directory
