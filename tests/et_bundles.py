"""ExecuTorch programs for the tests, each lowered once per test run: lowering takes seconds."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

from edgeqkv.artifact import Artifact
from edgeqkv.model import Decoder
from tests.bundles import make_bundle
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
    folder = Path(tempfile.mkdtemp(prefix="edgeqkv-et-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    artifact, bundle = make_bundle(
        "executorch", decoder, folder / "bundle", layout=layout, et_attention=attention
    )
    return decoder, artifact, bundle


def big() -> tuple[Decoder, Artifact, Path]:
    """Three capacities, the larger two with a cache of 64 KiB or more; a context above the chunk."""
    return et_bundle("q-gqa", "shared", layers=2, context=512)
