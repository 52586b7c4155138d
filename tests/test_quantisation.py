"""docs/quantisation.md is what its rows say, and its rows are of the checkpoints of this repository."""

import hashlib
import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("quantisation", DOCS / "quantisation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_generated_from_its_rows(script):
    rows = script.read_rows()
    assert script.document(rows) == (DOCS / "quantisation.md").read_text("utf-8")
    found = [(r["model"], r["backend"], r["weights"], r["cache"]) for r in rows]
    assert found == [
        (m, b, *case) for m in script.MODELS for b, c in script.CASES.items() for case in c
    ]


def test_the_rows_are_of_these_checkpoints(script):
    for row in script.read_rows():
        checkpoint = (script.CHECKPOINTS / f"{row['model']}.pt").read_bytes()
        assert row["sha256"] == hashlib.sha256(checkpoint).hexdigest(), row["model"]


def test_a_case_is_measured_and_a_refusal_is_a_row(script, tmp_path):
    """The real commands, on the smallest checkpoint and a few tokens."""
    pytest.importorskip("onnxruntime")
    tokenizer = script.CHECKPOINTS / "tokenizer.json"
    checkpoint = script.CHECKPOINTS / "kjv-q-mqa.pt"
    script.edgeqkv("import", checkpoint, "-o", tmp_path / "m", "--tokenizer", tokenizer)
    row = script.measure(tmp_path, "m", "onnx", "int8", "fp32", 64)
    assert row["refused"] is None
    assert row["tokens"] == 64
    assert abs(row["change"]) < 0.05
    with pytest.raises(RuntimeError, match="fp33"):
        script.edgeqkv("export", tmp_path / "m", "-o", tmp_path / "x", "--weights", "fp33")
