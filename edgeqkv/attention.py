"""Attention of every variant: how q, k and v are made, and the eager reference that reads them.

Shapes: B batch, S new tokens, T cached tokens, H query heads, G key/value heads, D head_dim.
``project`` gives q [B, S, H, D], k and v [B, S, G, D]; each backend lowers the reading its own way
through an ``Attend`` function, so this file is the only one that knows a variant.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgeqkv.spec import ModelSpec


class Attend(Protocol):
    """Read keys and values: (layer index, q [B,S,H,D], k [B,S,G,D], v [B,S,G,D]) -> [B,S,H*D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Projections of one layer. Which exist follows from ``spec.projections``."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        shapes = spec.parameter_shapes()
        for name in (*spec.projections, "o_proj"):
            rows, columns = shapes[f"h.{layer}.attn.{name}.weight"]
            self.add_module(name, nn.Linear(columns, rows, bias=spec.linear_bias))
        if spec.score_position_features:
            self.pos_w = nn.Parameter(torch.ones(spec.score_position_features))
            self.pos_b = nn.Parameter(torch.zeros(1))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, hidden_size] (normalised) -> q [B,S,H,D], k, v [B,S,G,D]; v is k when shared."""
        spec = self.spec
        made = {name: self.get_submodule(name)(x) for name in spec.projections}
        k = made["k_proj"]
        v = k if spec.key_is_value else made["v_proj"]
        q = made.get("q_proj", k if spec.qkv_sharing in ("q=k", "q=k=v") else x)
        if spec.query_mode == "residual":
            q = x + q
        elif spec.query_mode == "residual_gelu":
            q = x + F.gelu(q)
        # -1, not x.shape[1]: XNNPACK delegates a view only when no size in it is symbolic.
        heads = (x.shape[0], -1, spec.num_attention_heads, spec.head_dim)
        groups = (x.shape[0], -1, spec.num_key_value_heads, spec.head_dim)
        k = k.view(groups)
        return q.view(heads), k, k if spec.key_is_value else v.view(groups)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self.get_submodule("o_proj")(attend(self.layer, *self.project(x)))
        return out


def scores_softmax_values(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None
) -> Tensor:
    """softmax(q k^T * scale + bias) v, head groups as repeat_interleave. bias broadcasts to [B,H,S,T].

    q [B,S,H,D], k and v [B,T,G,D] -> [B,S,H*D].
    """
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return out.transpose(1, 2).flatten(2)


def causal_bias(past: int, new: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[S, past + S]: 0 where a new token may look, -inf at tokens after it."""
    full = torch.full((new, past + new), -math.inf, dtype=dtype)
    return full.triu(past + 1)


def position_features(length: int, features: int) -> Tensor:
    """P [length, length, features] of the (Q=K-V)+ term, as the code of arXiv 2606.04032 builds it.

    features // 2 channels encode the row i, the rest the column j; n channels encode position p as
    interleaved sin, cos of p / 10000^(2k/n).
    """
    half = features // 2
    rows = _sin_cos(length, half)[:, None, :].expand(length, length, half)
    columns = _sin_cos(length, features - half)[None].expand(length, length, features - half)
    return torch.cat([rows, columns], dim=-1)


def _sin_cos(length: int, channels: int) -> Tensor:
    index = torch.arange(channels)
    rate = torch.pow(10000.0, -(index - index % 2) / max(channels, 1))
    angle = torch.arange(length)[:, None] * rate
    return torch.where(index % 2 == 0, angle.sin(), angle.cos())


def positional_scores(
    q: Tensor, k: Tensor, v: Tensor, scale: float, features: Tensor, pos_w: Tensor, pos_b: Tensor
) -> Tensor:
    """Non-causal attention with the scalar position term of (Q=K-V)+.

    scores' = scores * sum(pos_w) + sum_c pos_w[c] * P[i,j,c] + pos_b, shared by all heads
    (arXiv 2606.04032). features is P [S,S,m]; q [B,S,H,D], k and v [B,S,G,D] -> [B,S,H*D].
    """
    bias = features @ pos_w + pos_b
    return scores_softmax_values(q * pos_w.sum(), k, v, scale, bias)
