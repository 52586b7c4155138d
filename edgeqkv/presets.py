"""Shapes of the papers' models, as data. No torch here.

Sizes: arXiv 2606.04032 (300M, 1.2B: biases, 2048 positions) and arXiv 2510.23912 (124M, 117M: the
nanoGPT of that paper, no bias anywhere, 1024 positions). All use the GPT-2 tokenizer, 50,257 ids
of 50,304, and tied embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgeqkv.errors import UsageError
from edgeqkv.spec import ModelSpec

GPT2_VOCAB, GPT2_TOKENS = 50_304, 50_257  # embedding rows, padded to a multiple of 64; real ids

_SIZES: dict[str, dict[str, int]] = {
    "300m": {"hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16},
    "1.2b": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32},
}
_GROUPS = {"300m": 4, "1.2b": 8}
# variant -> (qkv_sharing, key/value heads: all, the size's groups, or one)
_VARIANTS = {
    "qkv": ("none", "all"),
    "q=k-v": ("q=k", "all"),
    "q-k=v": ("k=v", "all"),
    "q=k=v": ("q=k=v", "all"),
    "gqa": ("none", "groups"),
    "mqa": ("none", "one"),
    "q-gqa": ("k=v", "groups"),
    "q-mqa": ("k=v", "one"),
}
_NANOGPT: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "linear_bias": False,
    "layer_norm_bias": False,
}
# W_Q = I halves the scale (arXiv 2510.23912); the larger MLP spends what W_Q saved.
_HALF_SCALE = {"query_mode": "identity", "attention_scale": 0.5 / math.sqrt(64)}


def _spec(**fields: Any) -> ModelSpec:
    heads = fields["num_attention_heads"]
    head_dim = fields["hidden_size"] // heads
    defaults = {
        "vocab_size": GPT2_VOCAB,
        "num_used_tokens": GPT2_TOKENS,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": 4 * fields["hidden_size"],
        "max_position_embeddings": 2048,
        "attention_scale": 1 / math.sqrt(head_dim),
    }
    return ModelSpec(**{**defaults, **fields})


def _all_presets() -> dict[str, ModelSpec]:
    presets = {}
    for size, dimensions in _SIZES.items():
        kv_heads = {"all": dimensions["num_attention_heads"], "groups": _GROUPS[size], "one": 1}
        for variant, (sharing, heads) in _VARIANTS.items():
            name = f"{size}-{variant}" + (f"-{_GROUPS[size]}" if heads == "groups" else "")
            presets[name] = _spec(
                **dimensions, qkv_sharing=sharing, num_key_value_heads=kv_heads[heads]
            )
    presets["124m-qkv"] = _spec(**_NANOGPT)
    presets["117m-q=i"] = _spec(**_NANOGPT, **_HALF_SCALE)
    presets["124m-q=i"] = _spec(**_NANOGPT, **_HALF_SCALE, intermediate_size=3456)
    return presets


PRESETS: Mapping[str, ModelSpec] = _all_presets()


def preset(name: str) -> ModelSpec:
    """The spec of a preset, e.g. ``300m-q-k=v``.

    Raises:
        UsageError: no such preset; the message lists them.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UsageError(f"no preset {name!r}; allowed: {', '.join(PRESETS)}") from None
