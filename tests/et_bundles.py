"""ExecuTorch programs for the tests, each lowered once per test run: lowering takes seconds."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from edgeqkv.artifact import Artifact, read_artifact
from edgeqkv.model import Decoder
from tests.bundles import make_bundle
from tests.session_folder import made_once
from tests.variants import VARIANTS, random_decoder


@functools.cache
def et_bundle(
    variant: str,
    layout: str = "auto",
    attention: str = "plain",
    *,
    layers: int = 1,
    context: int = 40,
) -> tuple[Decoder, Artifact, Path]:
    """One layer and one capacity unless a test needs more; never write into the folder."""
    spec = dataclasses.replace(
        VARIANTS[variant], num_hidden_layers=layers, max_position_embeddings=context
    )
    decoder = random_decoder(spec)
    name = f"executorch-{variant}-{layout}-{attention}-{layers}-{context}"
    with made_once(name) as (folder, missing):
        if missing:
            how = {"layout": layout, "et_attention": attention}
            make_bundle("executorch", decoder, folder, **how)
    return decoder, read_artifact(folder), folder


def big() -> tuple[Decoder, Artifact, Path]:
    """Three capacities, the larger two with a cache of 64 KiB or more; a context above the chunk."""
    return et_bundle("q-gqa", "shared", layers=2, context=512)
