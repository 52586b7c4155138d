"""Checkpoints as the papers' code writes them, and their forward pass, from SEEDS' description alone.

Nothing of edgeqkv is imported: key names, shapes and arithmetic are written a second time, in
float64 and head by head, so that an importer that is wrong cannot agree with it.
"""

import math

import torch

LAYERS, WIDTH, HEADS, INNER, VOCAB, POSITIONS = 2, 32, 4, 48, 61, 24
DIM = WIDTH // HEADS

# variant -> (projection rows, n_kv_groups of the config or None, (projected x) -> q, k, v)
_d = WIDTH
THREE = {
    "QKV": ({"c_attn": 3 * _d}, None, lambda p: p["c_attn"].split(_d, -1)),
    "Q=K-V": ({"c_kv": 2 * _d}, None, lambda p: (p["c_kv"][:, :_d], *p["c_kv"].split(_d, -1))),
    "Q-K=V": ({"c_q": _d, "c_k": _d}, None, lambda p: (p["c_q"], p["c_k"], p["c_k"])),
    "Q=K=V": ({"c_k": _d}, None, lambda p: (p["c_k"],) * 3),
    "GQA-2": ({"c_q": _d, "c_kv": 4 * DIM}, 2, lambda p: (p["c_q"], *p["c_kv"].split(2 * DIM, -1))),
    "MQA": ({"c_q": _d, "c_kv": 2 * DIM}, 1, lambda p: (p["c_q"], *p["c_kv"].split(DIM, -1))),
    "Q-GQA-2": ({"c_q": _d, "c_k": 2 * DIM}, 2, lambda p: (p["c_q"], p["c_k"], p["c_k"])),
    "Q-MQA": ({"c_q": _d, "c_kv": DIM}, 1, lambda p: (p["c_q"], p["c_kv"], p["c_kv"])),
}
# query_mode -> (rows of c_attn, (normalised x, projected) -> q, k, v)
WQKV = {
    "original": (3 * _d, lambda x, y: y.split(_d, -1)),
    "identity": (2 * _d, lambda x, y: (x, *y.split(_d, -1))),
    "residual": (3 * _d, lambda x, y: (x + y[:, :_d], y[:, _d : 2 * _d], y[:, 2 * _d :])),
    "residual_gelu": (
        3 * _d,
        lambda x, y: (x + _gelu(y[:, :_d]), y[:, _d : 2 * _d], y[:, 2 * _d :]),
    ),
}


def _gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


class _Weights:
    """Random tensors by name, with the modules' own shapes."""

    def __init__(self, seed):
        self.state, self.generator = {}, torch.Generator().manual_seed(seed)

    def add(self, name, *shape, scale, offset=0.0):
        noise = torch.randn(*shape, generator=self.generator)
        self.state[name] = noise * scale + offset

    def linear(self, name, out, into, bias):
        self.add(f"{name}.weight", out, into, scale=0.2)
        if bias:
            self.add(f"{name}.bias", out, scale=0.3)

    def norm(self, name, bias):
        self.add(f"{name}.weight", WIDTH, scale=0.2, offset=1.0)
        if bias:
            self.add(f"{name}.bias", WIDTH, scale=0.2)


def _body(prefix, rows, *, linear_bias, norm_bias, inner, tied, masks, seed):
    w = _Weights(seed)
    w.add(f"{prefix}wte.weight", VOCAB, WIDTH, scale=0.5)
    w.add(f"{prefix}wpe.weight", POSITIONS, WIDTH, scale=0.5)
    for i in range(LAYERS):
        block = f"{prefix}h.{i}"
        w.norm(f"{block}.ln_1", norm_bias)
        if masks:
            w.state[f"{block}.attn.bias"] = torch.ones(POSITIONS, POSITIONS).tril()[None, None]
        for name, out in rows.items():
            w.linear(f"{block}.attn.{name}", out, WIDTH, linear_bias)
        w.linear(f"{block}.attn.c_proj", WIDTH, WIDTH, linear_bias)
        w.norm(f"{block}.ln_2", norm_bias)
        w.linear(f"{block}.mlp.c_fc", inner, WIDTH, linear_bias)
        w.linear(f"{block}.mlp.c_proj", WIDTH, inner, linear_bias)
    w.norm(f"{prefix}ln_f", norm_bias)
    if not tied:
        w.add("lm_head.weight", VOCAB, WIDTH, scale=0.3)
    return w.state


def wrapped(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


def three_projections(variant, *, tied=True, bias=True, eps=1e-5, prefix="", seed=0):
    """(checkpoint dict, logits function) of arXiv 2606.04032's code."""
    rows, groups, qkv = THREE[variant]
    state = _body(
        "", rows, linear_bias=bias, norm_bias=True, inner=INNER, tied=tied, masks=True, seed=seed
    )
    config = {
        "vocab_size": VOCAB,
        "n_positions": POSITIONS,
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_inner": INNER,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": eps,
        "initializer_range": 0.02,
        "use_bias": bias,
        "tie_word_embeddings": tied,
        "use_flash_attention": True,
    }
    if groups is not None:
        config["n_kv_groups"] = groups
    checkpoint = {
        "step": 300,
        "epoch": 1,
        "tokens_seen": 384000,
        "model_state_dict": wrapped(state, prefix),
        "optimizer_state_dict": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []},
        "model_config": config,
        "train_config": {"seed": 42, "output_dir": "./outputs_gqa"},
    }

    def projections(i, x):
        linear = {n: _linear(state, f"h.{i}.attn.{n}", x) for n in rows}
        return qkv(linear)

    return checkpoint, _forward(state, "", projections, 1 / math.sqrt(DIM), eps)


def wqkv(mode, *, tied=True, bias=False, scale=0.3, inner=40, prefix="", seed=0):
    """(checkpoint dict, logits function) of arXiv 2510.23912's code."""
    rows, qkv = WQKV[mode]
    checkpoint, state = _nanogpt(rows, tied=tied, bias=bias, inner=inner, prefix=prefix, seed=seed)
    checkpoint["model_args"] |= {
        "num_heads": HEADS,
        "tie_weights": tied,
        "head_size": DIM,
        "scale": scale,
        "query_mode": mode,
        "mlp_hidden_size": inner,
    }

    def projections(i, x):
        return qkv(x, _linear(state, f"transformer.h.{i}.attn.c_attn", x))

    return checkpoint, _forward(state, "transformer.", projections, scale, 1e-5)


def nanogpt(*, bias, prefix="", seed=0):
    """(checkpoint dict, logits function) of nanoGPT: always tied, MLP four times the width."""
    inner = 4 * WIDTH
    checkpoint, state = _nanogpt(
        3 * WIDTH, tied=True, bias=bias, inner=inner, prefix=prefix, seed=seed
    )
    checkpoint["model_args"]["n_head"] = HEADS

    def projections(i, x):
        return _linear(state, f"transformer.h.{i}.attn.c_attn", x).split(WIDTH, -1)

    return checkpoint, _forward(state, "transformer.", projections, 1 / math.sqrt(DIM), 1e-5)


def _nanogpt(rows, *, tied, bias, inner, prefix, seed):
    state = _body(
        "transformer.",
        {"c_attn": rows},
        linear_bias=bias,
        norm_bias=bias,
        inner=inner,
        tied=tied,
        masks=False,
        seed=seed,
    )
    if tied:  # the same parameter under both names, as state_dict() gives it
        state["lm_head.weight"] = state["transformer.wte.weight"]
    args = {
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "block_size": POSITIONS,
        "bias": bias,
        "vocab_size": VOCAB,
        "dropout": 0.0,
    }
    checkpoint = {
        "model": wrapped(state, prefix),
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": args,
        "iter_num": 300,
        "best_val_loss": torch.tensor(2.5),
        "config": {"dataset": "openwebtext"},
    }
    return checkpoint, state


def _linear(state, name, x):
    out = x @ state[f"{name}.weight"].double().T
    return out + state[f"{name}.bias"].double() if f"{name}.bias" in state else out


def _norm(state, name, x, eps):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    out = (x - mean) / torch.sqrt(variance + eps) * state[f"{name}.weight"].double()
    return out + state[f"{name}.bias"].double() if f"{name}.bias" in state else out


def _attention(q, k, v, scale):
    """q [S, d], k and v [S, G*hd]; head h reads key/value head h // (heads / G), causally."""
    length, share = q.shape[0], WIDTH // k.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = []
    for h in range(HEADS):
        mine, theirs = (
            slice(h * DIM, (h + 1) * DIM),
            slice(h // share * DIM, (h // share + 1) * DIM),
        )
        scores = (q[:, mine] @ k[:, theirs].T * scale).masked_fill(future, -math.inf)
        out.append(torch.softmax(scores, -1) @ v[:, theirs])
    return torch.cat(out, -1)


def _forward(state, prefix, projections, scale, eps):
    def logits(ids):
        """ids [S] -> [S, vocab] float64."""
        x = state[f"{prefix}wte.weight"].double()[ids]
        x = x + state[f"{prefix}wpe.weight"].double()[: len(ids)]
        for i in range(LAYERS):
            block = f"{prefix}h.{i}"
            normed = _norm(state, f"{block}.ln_1", x, eps)
            attended = _attention(*projections(i, normed), scale)
            x = x + _linear(state, f"{block}.attn.c_proj", attended)
            inner = _linear(state, f"{block}.mlp.c_fc", _norm(state, f"{block}.ln_2", x, eps))
            x = x + _linear(state, f"{block}.mlp.c_proj", _gelu(inner))
        head = state.get("lm_head.weight", state[f"{prefix}wte.weight"]).double()
        return _norm(state, f"{prefix}ln_f", x, eps) @ head.T

    return logits
