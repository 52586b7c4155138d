"""Hugging Face's GPT-2, written a second time from its formulas: a folder, and the logits of its weights."""

import json
import math

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 101,
    "n_positions": 32,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
}


def random_state(config, prefix="transformer.", seed=0):
    """State dict; Conv1D weights are (in, out). An untied head is there when the config says so."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape, scale):
        return torch.randn(shape, generator=generator) * scale

    d, inner = config["n_embd"], config["n_inner"] or 4 * config["n_embd"]
    state = {
        "wte.weight": noise(config["vocab_size"], d, scale=0.5),
        "wpe.weight": noise(config["n_positions"], d, scale=0.5),
    }
    for i in range(config["n_layer"]):
        for name in ("ln_1", "ln_2"):
            state[f"h.{i}.{name}.weight"] = 1 + noise(d, scale=0.1)
            state[f"h.{i}.{name}.bias"] = noise(d, scale=0.1)
        for name, into, out in (
            ("attn.c_attn", d, 3 * d),
            ("attn.c_proj", d, d),
            ("mlp.c_fc", d, inner),
            ("mlp.c_proj", inner, d),
        ):
            state[f"h.{i}.{name}.weight"] = noise(into, out, scale=0.2)
            state[f"h.{i}.{name}.bias"] = noise(out, scale=0.1)
    state["ln_f.weight"], state["ln_f.bias"] = 1 + noise(d, scale=0.1), noise(d, scale=0.1)
    state = {prefix + name: tensor for name, tensor in state.items()}
    if config.get("tie_word_embeddings") is False:
        state["lm_head.weight"] = noise(config["vocab_size"], d, scale=0.5)
    return state


def logits(config, state, ids, prefix="transformer."):
    """ids [B, S] -> [B, S, vocab_size]."""
    p = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    d, heads, eps = config["n_embd"], config["n_head"], config["layer_norm_epsilon"]
    dim, length = d // heads, ids.shape[1]

    def norm(x, name):
        return F.layer_norm(x, (d,), p[f"{name}.weight"], p[f"{name}.bias"], eps)

    def conv1d(x, name):
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def act(x):
        if config["activation_function"] == "gelu":
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    later = torch.ones(length, length).triu(1).bool()
    x = p["wte.weight"][ids] + p["wpe.weight"][:length]
    for i in range(config["n_layer"]):
        q, k, v = (
            t.unflatten(-1, (heads, dim)).transpose(1, 2)
            for t in conv1d(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(d, dim=-1)
        )
        scores = q @ k.transpose(-1, -2)
        if config["scale_attn_weights"]:
            scores = scores / math.sqrt(dim)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        x = x + conv1d(mixed, f"h.{i}.attn.c_proj")
        x = x + conv1d(act(conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ p.get("lm_head.weight", p["wte.weight"]).T


def write_folder(folder, config, state, *, pickled=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    return folder
