"""ONNX with the inputs and outputs of optimum, so that ``ORTModelForCausalLM.from_pretrained(bundle)`` runs it.

``input_ids`` [B,S], ``attention_mask`` [B,T+S], ``position_ids`` [B,S] int64 and
``past_key_values.<i>.key`` / ``.value`` [B,G,T,D] -> ``logits`` [B,S,V],
``present.<i>.key`` / ``.value`` [B,G,T+S,D]. The runtime makes every present anew: two tensors per
layer and a copy of them on every step are part of this interface.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgeqkv.attention import scores_softmax_values
from edgeqkv.cache import CacheSpec
from edgeqkv.config import CONFIG
from edgeqkv.errors import UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.spec import ModelSpec
from export.backends import onnx_weights
from export.lowering import Request

FORMULATION = "optimum"
IO = ("edgeqkv", "optimum")


def check(request: Request) -> None:
    """Raises UnsupportedError for what optimum's interface cannot say."""
    cache = request.cache
    if cache.layout != "separate":
        raise UnsupportedError(
            f"onnx: --io optimum has a key and a value per layer, the cache layout is {cache.layout}; "
            "add --cache-layout separate"
        )
    if cache.dtype != "fp32":
        raise UnsupportedError(
            f"onnx: --io optimum keeps its cache in fp32, asked for {cache.dtype}; "
            "allowed: --cache-dtype fp32"
        )
    if request.recipe.rules:
        raise UnsupportedError(
            f"onnx: --io optimum keeps its weights in fp32, asked for {request.weights}"
        )


class _Optimum(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, pasts: list[Tensor]
    ) -> tuple[Tensor, ...]:
        past, new = pasts[0].shape[2], input_ids.shape[1]
        places = torch.arange(past + new)
        causal = places[None] <= places[past:, None]
        allowed = causal[None, None] & (attention_mask[:, None, None] != 0)
        # Finite, so that a row of padding, which may look nowhere, does not become NaN.
        bias = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
        scale = self.decoder.spec.attention_scale
        presents: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            held = [
                torch.cat([pasts[2 * layer + i], x.transpose(1, 2)], dim=2)
                for i, x in enumerate((k, v))
            ]
            presents.extend(held)
            k, v = (x.transpose(1, 2) for x in held)
            return scores_softmax_values(q, k, v, scale, bias)

        states = self.decoder.hidden(input_ids, position_ids, attend)
        logits = onnx_weights.head(self.decoder, states.flatten(0, 1))
        return logits.view(*input_ids.shape, -1), *presents


def program(
    decoder: Decoder, cache: CacheSpec
) -> tuple[nn.Module, tuple[Any, ...], Any, list[str], list[str]]:
    """(module, example arguments, dynamic shapes, input names, output names)."""
    batch, new, past = 2, 3, 5
    tokens = {0: "batch_size", 1: "sequence_length"}
    total = {0: "batch_size", 1: "total_sequence_length"}
    held = {0: "batch_size", 2: "past_sequence_length"}
    # Tensors of their own: torch.export takes one tensor in two places for one input.
    ids, positions = (torch.zeros(batch, new, dtype=torch.int64) for _ in range(2))
    mask = torch.ones(batch, past + new, dtype=torch.int64)
    shape = (batch, cache.num_key_value_heads, past, cache.head_dim)
    names = [f"{i}.{role}" for i in range(cache.num_layers) for role in cache.roles]
    return (
        _Optimum(decoder),
        (ids, mask, positions, [torch.zeros(shape) for _ in names]),
        (tokens, total, tokens, [held for _ in names]),
        ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{n}" for n in names)],
        ["logits", *(f"present.{n}" for n in names)],
    )


def write_configs(directory: Path, spec: ModelSpec) -> None:
    """``config.json``, ``generation_config.json`` and ``tokenizer_config.json`` beside the program."""
    spare = list(range(spec.used_tokens, spec.vocab_size))
    files = {
        CONFIG: _config(spec),
        # Ids that no tokenizer has must never be sampled.
        "generation_config.json": {"suppress_tokens": spare} if spare else {},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _config(spec: ModelSpec) -> dict[str, Any]:
    """A config whose type optimum knows: it takes the shape of an empty cache from there, no more.

    GPT-2 has neither grouped heads nor a head_dim of its own; of the types that have both, gemma is
    the oldest.
    """
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    common = {
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tie_word_embeddings,
        **tokens,
    }
    if spec.key_value_size == spec.hidden_size == spec.query_size:
        return {
            "model_type": "gpt2",
            "n_positions": spec.max_position_embeddings,
            "n_embd": spec.hidden_size,
            "n_layer": spec.num_hidden_layers,
            "n_head": spec.num_attention_heads,
            "n_inner": spec.intermediate_size,
            "activation_function": spec.hidden_act,
            "layer_norm_epsilon": spec.layer_norm_eps,
            **common,
        }
    return {
        "model_type": "gemma",
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        **common,
    }
