"""Every variant of the papers, tiny, as data; random weights big enough that errors show."""

from __future__ import annotations

import torch

from edgeqkv.model import Decoder
from edgeqkv.spec import ModelSpec

_BASE = {
    "vocab_size": 101,
    "num_used_tokens": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "attention_scale": 0.25,
}
_NANOGPT = {"linear_bias": False, "layer_norm_bias": False}


def spec(**changes: object) -> ModelSpec:
    return ModelSpec(**{**_BASE, **changes})  # type: ignore[arg-type]


CAUSAL = {
    "qkv": spec(),
    "q=k-v": spec(qkv_sharing="q=k"),
    "q-k=v": spec(qkv_sharing="k=v"),
    "q=k=v": spec(qkv_sharing="q=k=v"),
    "gqa": spec(num_key_value_heads=2),
    "mqa": spec(num_key_value_heads=1),
    "q-gqa": spec(num_key_value_heads=2, qkv_sharing="k=v"),
    "q-mqa": spec(num_key_value_heads=1, qkv_sharing="k=v"),
    "identity": spec(query_mode="identity", attention_scale=0.125, **_NANOGPT),
    "residual": spec(query_mode="residual", **_NANOGPT),
    "residual-gelu": spec(query_mode="residual_gelu", **_NANOGPT),
    "identity-k=v": spec(query_mode="identity", qkv_sharing="k=v"),
    "untied-tanh": spec(tie_word_embeddings=False, hidden_act="gelu_new", qkv_sharing="k=v"),
}
NON_CAUSAL = {
    "(q=k-v)+": spec(qkv_sharing="q=k", is_causal=False, score_position_features=10),
}
VARIANTS = CAUSAL | NON_CAUSAL
# (variant, cache layout) of every legal pair
LAYOUTS = [
    (name, layout)
    for name, s in CAUSAL.items()
    for layout in (("shared", "separate") if s.key_is_value else ("separate",))
]


def random_decoder(model: ModelSpec, seed: int = 0) -> Decoder:
    """Weights of a scale at which attention is peaked and every bias matters."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(model)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (0.5 if name.startswith("w") else 0.15))
            else:
                parameter.copy_(noise * 0.1 + (1.0 if ".ln_" in name or "ln_f" in name else 0.0))
                if name.endswith("bias"):
                    parameter.copy_(noise * 0.1)
    return decoder.eval().requires_grad_(False)
