"""ONNX bundles of the tiny variants, each exported once per test session."""

from __future__ import annotations

import atexit
import dataclasses
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
def decoder_of(variant: str, layers: int = 2) -> Decoder:
    return random_decoder(dataclasses.replace(VARIANTS[variant], num_hidden_layers=layers))


def onnx_bundle(
    variant: str, layout: str, attention: str = "auto", dtype: str = "fp32", layers: int = 2
) -> tuple[Artifact, Path]:
    """The folder is shared: copy it before you change it."""
    return _exported(variant, layout, attention, dtype, layers)


@functools.cache  # keyed by how it is called: a default left out and the same value given differ
def _exported(
    variant: str, layout: str, attention: str, dtype: str, layers: int
) -> tuple[Artifact, Path]:
    directory = Path(_root().name) / f"{variant}-{layout}-{attention}-{dtype}-{layers}"
    return make_bundle(
        "onnx",
        decoder_of(variant, layers),
        directory,
        layout=layout,
        dtype=dtype,
        onnx_attention=attention,
    )
