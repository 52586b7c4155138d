"""What an importer must refuse: damaged, hostile, ambiguous and inconsistent checkpoints."""

import contextlib
import io
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

import edgeqkv
from edgeqkv.errors import CheckpointError
from edgeqkv.importers import read_checkpoint
from tests import upstream


def refused(path):
    """The one line with which reading ``path`` fails."""
    with pytest.raises(CheckpointError) as e:
        read_checkpoint(str(path))
    message = str(e.value)
    assert "\n" not in message
    assert "; " in message  # what to do about it
    assert str(path) in message
    return message


@pytest.fixture
def reject(tmp_path):
    """Save a checkpoint and give the line with which it is refused."""

    def save_and_read(checkpoint):
        path = tmp_path / "ckpt.pt"
        torch.save(checkpoint, path)
        return refused(path)

    return save_and_read


def three(variant):
    checkpoint, _ = upstream.three_projections(variant)
    return checkpoint, checkpoint["model_state_dict"], checkpoint["model_config"]


# Files


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("empty.pt", b"", "is empty"),
        ("text.pt", b"hello, I am no checkpoint\n" * 9, "not a PyTorch checkpoint"),
        ("zip.pt", b"PK\x03\x04" + b"\0" * 99, "damaged or cut short"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}", "does not say which model it is"),
        ("pickle.pt", pickle.dumps({"model": 1}), "not a PyTorch checkpoint"),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path, name, data, words):
    path = tmp_path / name
    path.write_bytes(data)
    assert words in refused(path)


def test_absent_files_and_folders(tmp_path):
    assert "does not exist" in refused(tmp_path / "absent.pt")
    assert "is a folder" in refused(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        edgeqkv.load(tmp_path)


def test_truncated_anywhere(tmp_path):
    good = tmp_path / "good.pt"
    torch.save(three("Q-MQA")[0], good)
    data = good.read_bytes()
    path = tmp_path / "cut.pt"
    for size in (5, 64, len(data) // 2, len(data) - 100, len(data) - 1):
        path.write_bytes(data[:size])
        refused(path)


def test_random_damage_is_one_line_or_harmless(tmp_path):
    good = tmp_path / "good.pt"
    torch.save(three("Q-MQA")[0], good)
    data = good.read_bytes()
    pickled = data.index(b"data.pkl")
    generator = np.random.default_rng(0)
    path = tmp_path / "bad.pt"
    refusals = 0
    for _ in range(60):
        bad = bytearray(data)
        for at in generator.integers(pickled, pickled + 3000, 3):
            bad[at] = generator.integers(256)
        path.write_bytes(bad)
        with contextlib.suppress(CheckpointError):  # nothing else may come out
            read_checkpoint(str(path))
            continue
        refusals += 1
    assert refusals > 10


class Malicious:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_never_runs(tmp_path, zipped):
    target = tmp_path / "executed"
    checkpoint = three("Q-MQA")[0] | {"step": Malicious(target)}
    path = tmp_path / "evil.pt"
    torch.save(checkpoint, path, _use_new_zipfile_serialization=zipped)
    message = refused(path)
    assert "wants to run posix.mkdir" in message
    assert "nothing was executed" in message
    assert not target.exists()
    # It would have run: the file is live ammunition, not a blank.
    torch.load(path, weights_only=False)
    assert target.exists()


def test_a_malicious_bare_pickle_never_runs(tmp_path):
    target = tmp_path / "executed"
    path = tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps({"model": Malicious(target)}))
    refused(path)
    assert not target.exists()


def test_a_tensor_that_claims_more_than_the_file_holds(reject):
    checkpoint, state, _ = three("QKV")
    state["wte.weight"] = torch.zeros(1).expand(2**20, 2**20)
    assert "wte.weight [1048576, 1048576] is not a plain dense tensor" in reject(checkpoint)
    state["wte.weight"] = torch.empty(upstream.VOCAB, upstream.WIDTH, device="meta")
    assert "not a plain dense tensor" in reject(checkpoint)


def test_a_zip_bomb_of_names_is_refused(tmp_path):
    path = tmp_path / "other.pt"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as z:
        z.writestr("a/b.txt", "x")
    path.write_bytes(buffer.getvalue())
    refused(path)


# Formats


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ([1, 2], "holds a list"),
        ({}, "found keys: none"),
        ({"wte.weight": torch.zeros(2)}, "of no known format; found keys: wte.weight"),
        ({"model_state_dict": {}}, "has no model_config dict"),
        ({"model": {}}, "has no model_args dict"),
        ({"model_state_dict": {}, "model_config": {}}, "the weights are empty; expected a dict"),
        (
            {"model_state_dict": {"a": 1}, "model_config": {}},
            "'a' is int, expected tensors under names",
        ),
        ({"model_state_dict": [1], "model_config": {}}, "list; expected a dict of tensors"),
    ],
)
def test_unknown_formats(reject, checkpoint, words):
    assert words in reject(checkpoint)


def test_the_same_tensor_with_and_without_prefix(reject):
    checkpoint, state, _ = three("QKV")
    state["module.wte.weight"] = state["wte.weight"]
    assert "holds wte.weight twice" in reject(checkpoint)


# Tensors


@pytest.mark.parametrize(
    ("name", "shape"),
    [("h.1.attn.c_q.weight", "[32, 32]"), ("ln_f.bias", "[32]"), ("wpe.weight", "[24, 32]")],
)
def test_a_missing_tensor(reject, name, shape):
    checkpoint, state, _ = three("Q-K=V")
    del state[name]
    assert f"lacks tensor {name} {shape}" in reject(checkpoint)


@pytest.mark.parametrize(
    "name", ["h.0.attn.rope.inv_freq", "h.2.ln_1.weight", "h.0.attn.bias", "q_norm.weight"]
)
def test_an_extra_tensor(reject, name):
    checkpoint, state, _ = three("Q-K=V")
    state[name] = torch.zeros(7)
    assert f"extra tensor {name} [7]" in reject(checkpoint)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("wte.weight", (60, 32), "[61, 32]"),
        ("h.0.mlp.c_fc.weight", (32, 48), "[48, 32]"),
        ("h.1.attn.c_kv.weight", (16, 32), "[8, 32]"),
        ("h.1.attn.c_q.bias", (1, 32), "[32]"),
        ("ln_f.weight", (), "[32]"),
    ],
)
def test_a_misshapen_tensor(reject, name, shape, expected):
    checkpoint, state, _ = three("Q-MQA")
    state[name] = torch.zeros(shape)
    assert f"{name} is {list(shape)}, expected {expected}" in reject(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(reject, value):
    checkpoint, state, _ = three("Q-MQA")
    state["h.1.mlp.c_fc.weight"][3, 5] = value
    assert "h.1.mlp.c_fc.weight holds NaN or infinite values" in reject(checkpoint)


def test_integer_weights(reject):
    checkpoint, state, _ = three("Q-MQA")
    state["wpe.weight"] = state["wpe.weight"].int()
    assert "wpe.weight is torch.int32, expected floating point" in reject(checkpoint)


# Variants


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (16, ["key, then value of 1 head and", "one tensor for key and value of 2 heads"]),
        (32, ["key, then value of 2 heads and", "one tensor for key and value of 4 heads"]),
    ],
)
def test_two_variants_fit_without_n_kv_groups(reject, rows, words):
    checkpoint, state, config = three("MQA")
    del config["n_kv_groups"]
    for i in range(upstream.LAYERS):
        state[f"h.{i}.attn.c_kv.weight"] = torch.zeros(rows, 32)
        state[f"h.{i}.attn.c_kv.bias"] = torch.zeros(rows)
    message = reject(checkpoint)
    assert f"h.0.attn.c_kv.weight [{rows}, 32] fits two variants" in message
    assert all(w in message for w in [*words, "n_kv_groups in model_config would decide"])


def test_one_reading_is_enough_without_n_kv_groups(tmp_path):
    checkpoint, _, config = three("Q-MQA")
    del config["n_kv_groups"]
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert read_checkpoint(str(tmp_path / "ckpt.pt")).spec.label == "Q-MQA"


@pytest.mark.parametrize(
    ("variant", "groups", "words"),
    [
        ("GQA-2", 4, "h.0.attn.c_kv.weight is [32, 32], expected [64, 32] or [8, 32]"),
        ("MQA", 2, "h.0.attn.c_kv.weight is [16, 32], expected [32, 32] or [8, 32]"),
        ("Q-MQA", 2, "h.0.attn.c_kv.weight is [8, 32], expected [32, 32] or [8, 32]"),
        ("Q-GQA-2", 1, "h.0.attn.c_k.weight is [16, 32], expected [8, 32]"),
        ("Q-GQA-2", 3, "h.0.attn.c_k.weight is [16, 32], expected [24, 32]"),
        ("QKV", 2, "n_kv_groups is 2, but h.0.attn.c_attn.weight [96, 32]"),
        ("Q=K=V", 1, "n_kv_groups is 1, but h.0.attn.c_k.weight [32, 32]"),
    ],
)
def test_n_kv_groups_that_contradicts_the_shapes(reject, variant, groups, words):
    checkpoint, _, config = three(variant)
    config["n_kv_groups"] = groups
    assert words in reject(checkpoint)


def test_projections_of_two_variants_at_once(reject):
    checkpoint, state, _ = three("Q-K=V")
    state["h.0.attn.c_kv.weight"] = torch.zeros(64, 32)
    message = reject(checkpoint)
    assert "layer 0 has the attention projections c_k + c_kv + c_q" in message
    assert "allowed: c_attn; c_kv; c_k; c_k + c_q; c_kv + c_q" in message


def test_layers_of_different_variants(reject):
    checkpoint, state, _ = three("Q-K=V")
    state["h.1.attn.c_kv.weight"] = state.pop("h.1.attn.c_k.weight")
    assert "lacks tensor h.1.attn.c_k.weight [32, 32] of Q-K=V" in reject(checkpoint)


def test_a_plus_buffer_of_another_kind(reject):
    checkpoint, state, _ = three("Q=K-V")
    for i in range(upstream.LAYERS):
        state[f"h.{i}.attn.pos_w"] = torch.ones(10)
        state[f"h.{i}.attn.pos_b"] = torch.ones(1)
        state[f"h.{i}.attn.pos2d"] = torch.zeros(8, 8, 10)
    assert "h.0.attn.pos2d [8, 8, 10] is not the row and column" in reject(checkpoint)


# Configs


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "n_positions", "n_layer", "n_embd", "n_head", "n_inner", "layer_norm_epsilon"],
)
def test_a_missing_config_key(reject, key):
    checkpoint, _, config = three("Q-K=V")
    del config[key]
    assert f"model_config lacks {key!r}" in reject(checkpoint)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("n_head", 0, "'n_head' is 0, expected 1 or more"),
        ("n_head", 5, "n_embd 32 is not a multiple of n_head 5"),
        ("n_head", True, "'n_head' is True, expected int"),
        ("n_layer", "2", "'n_layer' is '2', expected int"),
        ("n_layer", 3, "lacks tensor h.2.ln_1.weight [32]"),
        ("n_layer", 1, "extra tensor h.1.attn.c_k.bias [32]"),
        ("n_embd", 64, "is [61, 32], expected [61, 64]"),
        ("layer_norm_epsilon", float("nan"), "layer_norm_eps is nan"),
        ("use_bias", 1, "'use_bias' is 1, expected bool"),
        ("use_bias", False, "extra tensor h.0.attn.c_k.bias [32]"),
        ("tie_word_embeddings", False, "lacks tensor lm_head.weight [61, 32]"),
        ("vocab_size", 2**40, "vocab_size is 1099511627776"),
    ],
)
def test_a_config_that_contradicts_the_weights(reject, key, value, words):
    checkpoint, _, config = three("Q-K=V")
    config[key] = value
    assert words in reject(checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query_mode": "identity"}, "c_attn.weight is [96, 32], expected [64, 32] for W_Q=I"),
        ({"query_mode": "routed"}, "'query_mode' is 'routed', allowed: original, identity"),
        ({"scale": None}, "'scale' is None, expected float"),
        ({"scale": -1.0}, "attention_scale is -1.0"),
        ({"qk_norm": True}, "'qk_norm' is True, allowed: false"),
        ({"mlp_hidden_size": 41}, "c_fc.weight is [40, 32], expected [41, 32]"),
        ({"bias": True}, "lacks tensor transformer.h.0.ln_1.bias [32]"),
        ({"num_heads": 3}, "n_embd 32 is not a multiple of num_heads 3"),
    ],
)
def test_wqkv_configs(reject, changes, words):
    checkpoint, _ = upstream.wqkv("original")
    checkpoint["model_args"] |= changes
    assert words in reject(checkpoint)


@pytest.mark.parametrize("key", ["query_mode", "scale", "mlp_hidden_size", "block_size"])
def test_wqkv_facts_that_nothing_else_tells(reject, key):
    checkpoint, _ = upstream.wqkv("residual")
    del checkpoint["model_args"][key]
    assert f"model_args lacks {key!r}" in reject(checkpoint)


def test_a_tied_head_that_differs(reject):
    checkpoint, _ = upstream.wqkv("identity")
    checkpoint["model"]["lm_head.weight"] = checkpoint["model"]["lm_head.weight"] + 1e-3
    message = reject(checkpoint)
    assert "tie_weights is true but lm_head.weight [61, 32] is not equal to" in message


def test_the_query_network_of_later_code(reject):
    checkpoint, _ = upstream.wqkv("residual_gelu")
    checkpoint["model"]["transformer.h.0.attn.residual_in.weight"] = torch.zeros(16, 32)
    assert "a query made by a small network of its own" in reject(checkpoint)
