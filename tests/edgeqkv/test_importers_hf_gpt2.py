"""Hugging Face GPT-2 folders become QKV models with the same logits."""

import json

import pytest
import torch

import edgeqkv
from edgeqkv.errors import CheckpointError
from edgeqkv.importers import read_checkpoint
from edgeqkv.model_dir import build
from edgeqkv.tokenizer import byte_tokenizer
from tests import hf_gpt2

IDS = torch.randint(0, 101, (2, 20), generator=torch.Generator().manual_seed(5))


def imported(folder):
    found = read_checkpoint(str(folder))
    return found, build(found.spec, found.state)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_function": "gelu", "n_inner": 40},
        {"scale_attn_weights": False, "layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False},
        {"prefix": ""},
        {"pickled": True},
        {"pickled": True, "masks": True},
    ],
    ids=str,
)
def test_same_logits(tmp_path, changes):
    pickled, masks = changes.pop("pickled", False), changes.pop("masks", False)
    prefix = changes.pop("prefix", "transformer.")
    config = {**hf_gpt2.CONFIG, **changes}
    state = hf_gpt2.random_state(config, prefix)
    expected = hf_gpt2.logits(config, state, IDS, prefix)
    if masks:  # transformers 4.30 and older saved these, and the tied head
        for i in range(2):
            state[f"{prefix}h.{i}.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
            state[f"{prefix}h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        state["lm_head.weight"] = state[f"{prefix}wte.weight"]
    folder = hf_gpt2.write_folder(tmp_path / "gpt2", config, state, pickled=pickled)
    found, decoder = imported(folder)
    assert found.spec.label == "QKV"
    assert found.spec.tie_word_embeddings is config.get("tie_word_embeddings", True)
    torch.testing.assert_close(decoder(IDS), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes", [{}, {"activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 40}]
)
def test_against_transformers(tmp_path, changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**hf_gpt2.CONFIG, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.eval().save_pretrained(tmp_path / "gpt2")
    with torch.no_grad():
        expected = model(IDS).logits
    _, decoder = imported(tmp_path / "gpt2")
    torch.testing.assert_close(decoder(IDS), expected, atol=1e-4, rtol=0)


def test_command_takes_the_tokenizer_along(tmp_path, cli):
    config = {**hf_gpt2.CONFIG, "vocab_size": 260}
    state = hf_gpt2.random_state(config)
    folder = hf_gpt2.write_folder(tmp_path / "gpt2", config, state)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    out = cli("import", folder, "-o", "model", "--json", check=0)
    assert json.loads(out.stdout)["source_format"] == "Hugging Face GPT-2"
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    model = edgeqkv.load(tmp_path / "model")
    assert model.spec.used_tokens == 256
    expected = hf_gpt2.logits(config, state, IDS)
    torch.testing.assert_close(model(IDS), expected, atol=1e-4, rtol=0)
    again = cli("import", tmp_path / "model", "-o", "other", check=1)
    assert "is a MODEL_DIR already" in again.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reorder_and_upcast_attn": True}, "'reorder_and_upcast_attn' is True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx' is True"),
        ({"add_cross_attention": True}, "'add_cross_attention' is True"),
        ({"activation_function": "relu"}, "'relu', allowed: gelu_new"),
        ({"model_type": "llama"}, "model_type is 'llama', allowed: 'gpt2'"),
        ({"n_head": 5}, "n_embd 48 is not a multiple of n_head 5"),
        ({"n_inner": 50}, "h.0.mlp.c_fc.weight is [192, 48], expected [50, 48]"),
        ({"n_layer": 3}, "lacks tensor transformer.h.2"),
        ({"n_layer": "2"}, "'n_layer' is '2', expected int"),
        ({"tie_word_embeddings": False}, "lacks tensor lm_head.weight"),
    ],
    ids=str,
)
def test_refused(tmp_path, changes, words):
    state = hf_gpt2.random_state(hf_gpt2.CONFIG)
    folder = hf_gpt2.write_folder(tmp_path / "gpt2", {**hf_gpt2.CONFIG, **changes}, state)
    with pytest.raises(CheckpointError) as e:
        read_checkpoint(str(folder))
    assert words in str(e.value)
    assert "\n" not in str(e.value)


def test_weights_absent_sharded_or_cut(tmp_path):
    folder = hf_gpt2.write_folder(
        tmp_path / "gpt2", hf_gpt2.CONFIG, hf_gpt2.random_state(hf_gpt2.CONFIG)
    )
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        read_checkpoint(str(folder))
    path.unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        read_checkpoint(str(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="in shards"):
        read_checkpoint(str(folder))
    (folder / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_checkpoint(str(folder))


def test_what_is_not_recorded_is_said(tmp_path):
    config = {**hf_gpt2.CONFIG, "surprise": 1}
    folder = hf_gpt2.write_folder(tmp_path / "gpt2", config, hf_gpt2.random_state(config))
    found, _ = imported(folder)
    notes = "\n".join(found.inferences)
    assert "tie_word_embeddings true: tie_word_embeddings is not recorded" in notes
    assert "not used: surprise" in notes
