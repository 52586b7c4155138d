"""Tiny bundles with golden vectors, in folders that a test may change."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from edgeqkv.artifact import GOLDEN, MANIFEST, Golden, file_entry, read_artifact, write_golden
from export.golden import make_golden
from tests.bundles import make_bundle
from tests.onnx_bundles import decoder_of, onnx_bundle
from tests.variants import VARIANTS, random_decoder


def golden_bundle(folder: Path, variant: str, *how: str) -> Path:
    _, source = onnx_bundle(variant, *how)
    shutil.copytree(source, folder)
    capacity = read_artifact(folder).cache.capacity
    return set_golden(folder, make_golden(decoder_of(variant), capacity))


def exported(folder: Path, backend: str, variant: str, *, layers: int = 1, **how: Any) -> Path:
    """A bundle of its own; ``how`` as ``make_bundle`` takes it. Golden: the rounded weights' model."""
    decoder = random_decoder(dataclasses.replace(VARIANTS[variant], num_hidden_layers=layers))
    artifact, _ = make_bundle(backend, decoder, folder, **how)
    return set_golden(folder, make_golden(decoder, artifact.cache.capacity))


def set_golden(bundle: Path, golden: Golden) -> Path:
    """Write golden vectors, right or wrong ones, and the manifest that lists them."""
    artifact = read_artifact(bundle, check_sha256=False)
    write_golden(bundle, golden)
    files = {**artifact.files, GOLDEN: file_entry(bundle / GOLDEN)}
    manifest = dataclasses.replace(artifact, files=files).to_dict()
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    return bundle
