"""Plain nanoGPT checkpoints: three projections, biases or none, GPT-2's layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgeqkv.importers.convert import (
    Imported,
    Source,
    drop_masks,
    has_bias,
    make_spec,
    note_unknown,
    take,
    tied,
    used_tokens,
    width_heads_dim,
)

NAME = "nanoGPT"
STATE, CONFIG = "model", "model_args"

_PREFIX = "transformer."
_FUSED = {"c_attn": ("q_proj", "k_proj", "v_proj"), "c_proj": ("o_proj",)}


def detect(checkpoint: Mapping[str, Any]) -> bool:
    return STATE in checkpoint


def convert(source: Source) -> Imported:
    drop_masks(source)
    width, heads, dim = width_heads_dim(source, "n_head")
    vocab_size = source.size("vocab_size")
    bias = has_bias(source, "bias", f"{_PREFIX}ln_f.bias")
    spec = make_spec(
        source,
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=source.size("n_layer"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=dim,
        intermediate_size=4 * width,
        max_position_embeddings=source.size("block_size"),
        attention_scale=1 / math.sqrt(dim),
        layer_norm_bias=bias,
        linear_bias=bias,
        tie_word_embeddings=tied(source, "tie_weights", f"{_PREFIX}wte.weight"),
        num_used_tokens=used_tokens(source, vocab_size),
    )
    source.note("hidden_act gelu: the exact one of nanoGPT since 2023-03; not recorded")
    used = ("vocab_size", "n_layer", "n_head", "n_embd", "block_size", "bias", "tie_weights")
    note_unknown(source, (*used, "dropout"))
    state = take(source, spec, _FUSED, _PREFIX)
    return Imported(spec, state, NAME, tuple(source.inferences))
