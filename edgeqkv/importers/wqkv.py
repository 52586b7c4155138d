"""Checkpoints of "Key and Value Weights Are Probably All You Need" (arXiv 2510.23912).

A nanoGPT derivative whose ``model_args`` record how the query is made, and the attention scale.
"""

from __future__ import annotations

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

NAME = "wqkv (arXiv 2510.23912)"
STATE, CONFIG = "model", "model_args"

_PREFIX = "transformer."
_QUERY_MODES = {
    "original": "projected",
    "identity": "identity",
    "residual": "residual",
    "residual_gelu": "residual_gelu",
}
# Later versions of that code can normalise queries and keys; this decoder does not.
_MUST_BE_OFF = ("qk_norm", "k_norm", "per_head_norm")
_USED = (
    *("vocab_size", "n_layer", "num_heads", "n_embd", "block_size", "bias", "tie_weights"),
    *("head_size", "scale", "query_mode", "mlp_hidden_size"),
)


def detect(checkpoint: Mapping[str, Any]) -> bool:
    args = checkpoint.get(CONFIG)
    return (
        STATE in checkpoint
        and isinstance(args, Mapping)
        and bool({"num_heads", "query_mode"} & set(args))
    )


def convert(source: Source) -> Imported:
    drop_masks(source)
    width, heads, dim = width_heads_dim(source, "num_heads")
    mode = _query_mode(source)
    vocab_size = source.size("vocab_size")
    bias = has_bias(source, "bias", f"{_PREFIX}ln_f.bias")
    spec = make_spec(
        source,
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=source.size("n_layer"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_head_size(source, heads, dim),
        intermediate_size=source.size("mlp_hidden_size"),
        max_position_embeddings=source.size("block_size"),
        attention_scale=source.get("scale", float),
        query_mode=mode,
        layer_norm_bias=bias,
        linear_bias=bias,
        tie_word_embeddings=tied(source, "tie_weights", f"{_PREFIX}wte.weight"),
        num_used_tokens=used_tokens(source, vocab_size),
    )
    note_unknown(source, (*_USED, *_MUST_BE_OFF, "dropout"))
    rows = ("k_proj", "v_proj") if mode == "identity" else ("q_proj", "k_proj", "v_proj")
    state = take(source, spec, {"c_attn": rows, "c_proj": ("o_proj",)}, _PREFIX)
    return Imported(spec, state, NAME, tuple(source.inferences))


def _query_mode(source: Source) -> str:
    for key in _MUST_BE_OFF:
        if source.config.get(key):
            raise source.fail(
                f"model_args {key!r} is {source.config[key]!r}, allowed: false",
                "a model trained otherwise is not supported",
            )
    mode = source.get("query_mode", str)
    if mode not in _QUERY_MODES:
        raise source.fail(
            f"model_args 'query_mode' is {mode!r}, allowed: {', '.join(_QUERY_MODES)}",
            "a model trained with another is not supported",
        )
    if extra := [n for n in source.state if ".attn.residual_" in n]:
        raise source.fail(
            f"{min(extra)}: a query made by a small network of its own (later code of that paper) is "
            "not supported",
            "residual_gelu here is x + gelu(W_Q x), without such tensors",
        )
    return _QUERY_MODES[mode]


def _head_size(source: Source, heads: int, dim: int) -> int:
    """head_size where the weights have it; that code itself always splits n_embd evenly."""
    recorded = source.config.get("head_size")
    if recorded is None or recorded == dim:
        return dim
    size = source.size("head_size")
    shape = list(source.tensor(f"{_PREFIX}h.0.attn.c_proj.weight").shape)
    if shape[1:] == [heads * size]:
        return size
    source.note(
        f"head_dim {dim}: n_embd / num_heads, as h.0.attn.c_proj.weight {shape} has it; "
        f"the recorded head_size {size} is not used"
    )
    return dim
