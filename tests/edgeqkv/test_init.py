import json
import math

import pytest
import torch
from safetensors import safe_open

from edgeqkv import presets
from edgeqkv.commands.init import run
from edgeqkv.errors import EdgeQKVError, UsageError
from edgeqkv.model_dir import load_model_dir
from tests.variants import CAUSAL


@pytest.fixture
def tiny(monkeypatch):
    """The presets are too large for a test; the command itself is the real one."""
    spec = CAUSAL["q-mqa"]
    monkeypatch.setattr(presets, "PRESETS", {"tiny": spec})
    return spec


def weights(folder):
    with safe_open(folder / "model.safetensors", "pt") as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118


def test_gpt2_initialisation(tmp_path, tiny, capsys):
    run("tiny", tmp_path / "a", 3, False, True)
    assert json.loads(capsys.readouterr().out)["parameters"] == tiny.num_parameters()
    state = weights(tmp_path / "a")
    assert {n: tuple(t.shape) for n, t in state.items()} == tiny.parameter_shapes()
    assert {t.dtype for t in state.values()} == {torch.float32}
    residual = 0.02 / math.sqrt(2 * tiny.num_hidden_layers)
    for name, tensor in state.items():
        if name.endswith("bias"):
            assert (tensor == 0).all(), name
        elif tensor.dim() == 1:
            assert (tensor == 1).all(), name
        else:
            std = residual if name.endswith(("o_proj.weight", "mlp.c_proj.weight")) else 0.02
            std = 0.01 if name == "wpe.weight" else std
            assert tensor.std() == pytest.approx(std, rel=0.1), name
            assert abs(tensor.mean()) < 0.1 * std, name


def test_a_seed_is_a_model(tmp_path, tiny):
    for name, seed in {"a": 0, "b": 0, "c": 1}.items():
        run("tiny", tmp_path / name, seed, False, False)
    a, b, c = (weights(tmp_path / n) for n in "abc")
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["wte.weight"], c["wte.weight"])


def test_it_loads_and_says_that_it_is_random(tmp_path, tiny):
    run("tiny", tmp_path / "a", 0, False, False)
    model = load_model_dir(tmp_path / "a")
    assert model.spec == tiny
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, tiny.vocab_size)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert "not trained" in config["provenance"]["source_format"]


def test_refusals_come_before_any_work(tmp_path, tiny):
    with pytest.raises(UsageError, match="no preset 'huge'; allowed: tiny"):
        run("huge", tmp_path / "a", 0, False, False)
    run("tiny", tmp_path / "a", 0, False, False)
    with pytest.raises(EdgeQKVError, match="--overwrite"):
        run("tiny", tmp_path / "a", 0, False, False)
    run("tiny", tmp_path / "a", 0, True, False)
