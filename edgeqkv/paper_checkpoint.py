"""The checkpoint format of the papers' three-projections code (arXiv 2606.04032): names and config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from edgeqkv.spec import ModelSpec


def paper_projections(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Name in the papers' three-projections code -> our projections, stacked along the rows."""
    grouped = spec.num_key_value_heads != spec.num_attention_heads
    if spec.qkv_sharing == "none":
        if grouped:
            return {"c_q": ("q_proj",), "c_kv": ("k_proj", "v_proj")}
        return {"c_attn": ("q_proj", "k_proj", "v_proj")}
    if spec.qkv_sharing == "k=v":
        mqa = grouped and spec.num_key_value_heads == 1
        return {"c_q": ("q_proj",), "c_kv" if mqa else "c_k": ("k_proj",)}
    return {"c_kv": ("k_proj", "v_proj")} if spec.qkv_sharing == "q=k" else {"c_k": ("k_proj",)}


def to_paper_state(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the papers' names (arXiv 2606.04032), without the causal mask buffers."""
    out = {}
    for name, tensor in state.items():
        head, _, projection = name.rpartition(".attn.")
        source, _, kind = projection.rpartition(".")
        if not head or source == "o_proj":
            out[name.replace(".o_proj.", ".c_proj.")] = tensor
            continue
        for target, parts in paper_projections(spec).items():
            if source == parts[0]:
                stacked = [state[f"{head}.attn.{part}.{kind}"] for part in parts]
                out[f"{head}.attn.{target}.{kind}"] = torch.cat(stacked)
    return out


def from_paper_state(spec: ModelSpec, paper: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`to_paper_state`."""
    out = {}
    for name, tensor in paper.items():
        head, _, projection = name.rpartition(".attn.")
        target, _, kind = projection.rpartition(".")
        if not head or target == "c_proj":
            out[f"{head}.attn.o_proj.{kind}" if head else name] = tensor
            continue
        parts = paper_projections(spec)[target]
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
            out[f"{head}.attn.{part}.{kind}"] = rows
    return out


def paper_config(spec: ModelSpec) -> dict[str, Any]:
    """``model_config`` as the papers' code writes it: the variant itself is not recorded."""
    config = {
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_position_embeddings,
        "n_layer": spec.num_hidden_layers,
        "n_embd": spec.hidden_size,
        "n_head": spec.num_attention_heads,
        "n_inner": spec.intermediate_size,
        "layer_norm_epsilon": spec.layer_norm_eps,
        "use_bias": spec.linear_bias,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }
    if spec.num_key_value_heads != spec.num_attention_heads:
        config["n_kv_groups"] = spec.num_key_value_heads
    return config
