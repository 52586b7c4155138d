"""A manifest that says something else than the program is refused before anything is bound."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from device_bench.runners.run_onnx import load
from edgeqkv.errors import BundleError
from tests.onnx_bundles import onnx_bundle

# field of the manifest's cache, a false value, what is named
EDITS: list[tuple[str, Any, str]] = [
    ("layout", "separate", "cache.0.k"),
    ("num_key_value_heads", 1, "cache.0.kv"),
    ("head_dim", 4, "cache.0.kv"),
    ("num_layers", 3, "cache.2.kv"),
    ("dtype", "fp16", "cache.0.kv"),
]


@pytest.mark.parametrize("attention", ["gemm", "gqa"])
@pytest.mark.parametrize(("field", "value", "named"), EDITS)
def test_edited_cache(attention: str, field: str, value: Any, named: str) -> None:
    artifact, directory = onnx_bundle("q-gqa", "shared", attention)
    cache = dataclasses.replace(artifact.cache, **{field: value})
    edited = dataclasses.replace(artifact, cache=cache)
    with pytest.raises(BundleError, match=rf"does not match its manifest: .*{re.escape(named)}"):
        load(edited, directory, threads=1, capacity=16)


@pytest.mark.parametrize("attention", ["gemm", "gqa"])
def test_edited_formulation_and_vocabulary(attention: str) -> None:
    artifact, directory = onnx_bundle("q-gqa", "shared", attention)
    other = {"gemm-prefix": "gqa-aliased", "gqa-aliased": "gemm-prefix"}[artifact.formulation]
    model = dataclasses.replace(artifact.model, vocab_size=artifact.model.vocab_size + 1)
    for changed in ({"formulation": other}, {"formulation": "full"}, {"model": model}):
        with pytest.raises(BundleError, match="does not match its manifest"):
            load(dataclasses.replace(artifact, **changed), directory, threads=1, capacity=16)
