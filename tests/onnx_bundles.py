"""ONNX bundles of the tiny variants, each exported once per test session."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path

from edgeqkv.artifact import Artifact
from edgeqkv.model import Decoder
from tests.bundles import make_bundle
from tests.variants import VARIANTS, random_decoder


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    root = tempfile.TemporaryDirectory(prefix="edgeqkv-test-onnx-")
    atexit.register(root.cleanup)
    return root


@functools.cache
def decoder_of(variant: str) -> Decoder:
    return random_decoder(VARIANTS[variant])


@functools.cache
def onnx_bundle(
    variant: str, layout: str, attention: str = "auto", dtype: str = "fp32"
) -> tuple[Artifact, Path]:
    """The folder is shared: copy it before you change it."""
    directory = Path(_root().name) / f"{variant}-{layout}-{attention}-{dtype}"
    return make_bundle(
        "onnx",
        decoder_of(variant),
        directory,
        layout=layout,
        dtype=dtype,
        onnx_attention=attention,
    )
