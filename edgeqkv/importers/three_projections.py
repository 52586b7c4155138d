"""Checkpoints of "Do Transformers Need Three Projections?" (arXiv 2606.04032).

The variant is not recorded: it follows from the projections' names and shapes and from ``n_head``.
``n_kv_groups`` is in grouped configs only; where it is absent and the shapes allow two readings,
nothing is guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from edgeqkv.attention import position_features
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

NAME = "three-projections (arXiv 2606.04032)"
STATE, CONFIG = "model_state_dict", "model_config"

_USED = (
    *("vocab_size", "n_positions", "n_layer", "n_embd", "n_head", "n_kv_groups", "n_inner"),
    *("layer_norm_epsilon", "use_bias", "tie_word_embeddings"),
)
_TRAINING_ONLY = (
    *("embd_pdrop", "resid_pdrop", "attn_pdrop", "initializer_range", "use_flash_attention"),
)


class _Reading(NamedTuple):
    """One way to read a layer: their projection -> ours in row order, and the key/value tensor.

    kv_heads: ``all`` as many as query heads, ``any`` number that divides them, or ``one``.
    """

    sharing: str
    kv: str
    fused: Mapping[str, tuple[str, ...]]
    kv_heads: str

    def rows_per_head(self, dim: int) -> int:
        return len(self.fused[self.kv]) * dim

    def describe(self, groups: int) -> str:
        what = {"none": "key, then value", "k=v": "one tensor for key and value"}[self.sharing]
        return f"{what} of {groups} head{'s' * (groups > 1)}"


_Q = {"c_q": ("q_proj",)}
_READINGS = {
    ("c_attn",): [_Reading("none", "c_attn", {"c_attn": ("q_proj", "k_proj", "v_proj")}, "all")],
    ("c_kv",): [_Reading("q=k", "c_kv", {"c_kv": ("k_proj", "v_proj")}, "all")],
    ("c_k",): [_Reading("q=k=v", "c_k", {"c_k": ("k_proj",)}, "all")],
    ("c_k", "c_q"): [_Reading("k=v", "c_k", {**_Q, "c_k": ("k_proj",)}, "any")],
    ("c_kv", "c_q"): [
        _Reading("none", "c_kv", {**_Q, "c_kv": ("k_proj", "v_proj")}, "any"),
        _Reading("k=v", "c_kv", {**_Q, "c_kv": ("k_proj",)}, "one"),
    ],
}


def detect(checkpoint: Mapping[str, Any]) -> bool:
    return STATE in checkpoint


def convert(source: Source) -> Imported:
    drop_masks(source)
    width, heads, dim = width_heads_dim(source, "n_head")
    reading, groups = _reading(source, heads, dim)
    vocab_size = source.size("vocab_size")
    features = _score_position_features(source)
    spec = make_spec(
        source,
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=source.size("n_layer"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=dim,
        intermediate_size=source.size("n_inner"),
        max_position_embeddings=source.size("n_positions"),
        attention_scale=1 / math.sqrt(dim),
        qkv_sharing=reading.sharing,
        layer_norm_eps=source.get("layer_norm_epsilon", float),
        linear_bias=has_bias(source, "use_bias", "h.0.attn.c_proj.bias"),
        tie_word_embeddings=tied(source, "tie_word_embeddings", "wte.weight"),
        is_causal=not features,
        score_position_features=features,
        num_used_tokens=used_tokens(source, vocab_size),
    )
    names = " + ".join(sorted(reading.fused))
    source.note(f"variant {spec.label}: from {names}, their shapes and n_head {heads}")
    note_unknown(source, (*_USED, *_TRAINING_ONLY))
    state = take(source, spec, {**reading.fused, "c_proj": ("o_proj",)})
    return Imported(spec, state, NAME, tuple(source.inferences))


def _reading(source: Source, heads: int, dim: int) -> tuple[_Reading, int]:
    """The one reading of layer 0 that config and shapes allow, with its number of key/value heads."""
    start = "h.0.attn."
    found = {n.removeprefix(start).split(".")[0] for n in source.state if n.startswith(start)}
    names = tuple(sorted(n for n in found if n.startswith("c_") and n != "c_proj"))
    if names not in _READINGS:
        known = "; ".join(" + ".join(n) for n in _READINGS)
        raise source.fail(
            f"layer 0 has the attention projections {' + '.join(names) or 'none'}, which is no "
            f"variant of this format; allowed: {known}",
            "another is not supported",
        )
    return _fitting(source, _READINGS[names], f"{start}{_READINGS[names][0].kv}.weight", heads, dim)


def _fitting(
    source: Source, readings: list[_Reading], kv: str, heads: int, dim: int
) -> tuple[_Reading, int]:
    shape = list(source.tensor(kv).shape)
    rows = shape[0] if shape else 0
    recorded = source.size("n_kv_groups") if "n_kv_groups" in source.config else None
    if readings[0].kv_heads == "all":
        if recorded not in (None, heads):
            raise source.fail(
                f"n_kv_groups is {recorded}, but {kv} {shape} is of a variant with as many key as "
                f"query heads (n_head {heads})"
            )
        return readings[0], heads
    fits = []
    for reading in readings:
        groups, rest = divmod(rows, reading.rows_per_head(dim))
        if groups and not rest and heads % groups == 0 and recorded in (None, groups):
            fits.append((reading, groups))
    if len(fits) > 1:
        both = " and ".join(reading.describe(groups) for reading, groups in fits)
        raise source.fail(
            f"{kv} {shape} fits two variants: {both} (head_dim {dim}); n_kv_groups in "
            f"{source.config_name} would decide and is not recorded",
            "record it and save the checkpoint again",
        )
    if not fits or (fits[0][0].kv_heads == "one" and fits[0][1] != 1):
        expected = " or ".join(_expected(reading, recorded, shape, dim) for reading in readings)
        raise source.fail(f"{kv} is {shape}, expected {expected} (n_head {heads})")
    if recorded is None:
        source.note(
            f"num_key_value_heads {fits[0][1]}: n_kv_groups is not recorded, {kv} is {shape}"
        )
    return fits[0]


def _expected(reading: _Reading, recorded: int | None, shape: list[int], dim: int) -> str:
    groups = 1 if reading.kv_heads == "one" else recorded
    per_head = reading.rows_per_head(dim)
    rows = f"n_kv_groups*{per_head}" if groups is None else str(groups * per_head)
    return f"[{', '.join([rows, *map(str, shape[1:])])}]"


def _score_position_features(source: Source) -> int:
    """m of the (+) term, 0 without it. Its fixed buffer P must be the one that is computed here."""
    weight = source.state.get("h.0.attn.pos_w")
    if weight is None:
        return 0
    if weight.dim() != 1:
        raise source.fail(f"h.0.attn.pos_w is {list(weight.shape)}, expected [m]")
    features = weight.shape[0]
    for name, tensor in list(source.state.items()):
        if re.fullmatch(r"h\.\d+\.attn\.\w+", name) and tensor.dim() == 3:
            computed = position_features(tensor.shape[0], features)
            if tensor.shape != computed.shape or not torch.allclose(
                tensor.to(computed.dtype), computed, atol=1e-3, rtol=0
            ):
                raise source.fail(
                    f"{name} {list(tensor.shape)} is not the row and column sine-cosine buffer "
                    f"{list(computed.shape)} of the (+) variants"
                )
            del source.state[name]
    source.note("is_causal false: pos_w belongs to the (+) variants of the non-causal tasks")
    return features
