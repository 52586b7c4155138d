"""Checkpoints that the papers' own code trained and saved, with the logits it computed."""

from pathlib import Path

import numpy as np
import pytest
import torch

import edgeqkv

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "tests" / "golden").glob("*/checkpoint.pt"))
# The full set lies beside the checkout where this was developed; it is not part of the repository.
OTHERS = sorted((ROOT.parent / "shared" / "golden").glob("*/checkpoint.pt"))

LABELS = {
    "three-projections-GQA": "GQA-2",
    "three-projections-K_EQ_V": "Q-K=V",
    "three-projections-Q-MQA": "Q-MQA",
    "three-projections-QKV": "QKV",
    "three-projections-Q_EQ_K": "Q=K-V",
    "wqkv-identity": "W_Q=I",
    "wqkv-original": "QKV",
}


def check(path):
    model = edgeqkv.load(path)
    assert model.spec.label == LABELS[path.parent.name]
    reference = np.load(path.with_name("reference.npz"))
    got = model(torch.from_numpy(reference["input_ids"]).long()).numpy()
    np.testing.assert_allclose(got, reference["logits"], atol=1e-4, rtol=0)


def test_three_are_shipped():
    assert len(SHIPPED) == 3


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.parent.name)
def test_shipped(path):
    check(path)


@pytest.mark.skipif(not OTHERS, reason="no ../shared/golden beside this checkout")
@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.parent.name)
def test_all(path):
    check(path)
