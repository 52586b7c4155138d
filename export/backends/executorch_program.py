"""The decoder as ExecuTorch programs: static cache buffers, two ways for attention to read them.

Shapes: S new tokens, C capacity, H query heads, G key/value heads, R = H/G, D head_dim, V vocabulary.
Sizes that follow S are always written -1: XNNPACK takes a view only when no size is symbolic, and
a view left outside splits its graph and puts the scores [H,S,C] into planned memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgeqkv.attention import position_features
from edgeqkv.cache import CacheSpec
from edgeqkv.model import Decoder

_FORBIDDEN = -1e9  # added per position of the future; exp() of it is exactly 0


class _Layer(nn.Module):
    """The cache tensors of one layer, one float32 buffer per role, all zeros."""

    def __init__(self, roles: tuple[str, ...], shape: tuple[int, ...]) -> None:
        super().__init__()
        for role in roles:
            self.register_buffer(role, torch.zeros(shape))


def cache_buffers(cache: CacheSpec, shape: tuple[int, ...]) -> nn.ModuleList:
    """Buffers of ``shape``; in a module's member ``cache`` they are named as ``CacheSpec.names()``."""
    return nn.ModuleList(_Layer(cache.roles, shape) for _ in range(cache.num_layers))


class Plain(nn.Module):
    """input_ids [1,S] int64, input_pos [S] int64 -> logits [1,1,V] float32 of the last token.

    Portable aten operators only. One buffer is [G,C,D].

    Rows are written in place; the whole capacity is multiplied and what is after a token's own
    position is masked, so cost follows C. The scores are cache @ q^T, because XNNPACK repacks the
    second operand of a product on each call and the cache is the large one.
    """

    def __init__(self, decoder: Decoder, cache: CacheSpec, capacity: int) -> None:
        super().__init__()
        self.decoder = decoder
        shape = (cache.num_key_value_heads, capacity, cache.head_dim)
        self.cache = cache_buffers(cache, shape)
        self.register_buffer("columns", torch.arange(capacity).float(), persistent=False)

    def forward(self, input_ids: Tensor, input_pos: Tensor) -> Tensor:
        scale = self.decoder.spec.attention_scale
        ahead = torch.relu(self.get_buffer("columns") - input_pos.float()[:, None, None])
        bias = ahead * _FORBIDDEN  # [S,1,C]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            buffers = list(self.cache[layer].buffers())
            for buffer, new in zip(buffers, (k, v), strict=False):
                torch.ops.aten.index_put_(buffer, [None, input_pos], heads_first(new))
            return grouped(q * scale, buffers[0], buffers[-1], bias)

        return self.decoder.run(input_ids, input_pos, attend)


class Custom(nn.Module):
    """As :class:`Plain` with ExecuTorch's LLM operators. One buffer is [1,C,G,D]; cost follows the
    position."""

    def __init__(self, decoder: Decoder, cache: CacheSpec, capacity: int) -> None:
        super().__init__()
        self.decoder, self.capacity = decoder, capacity
        shape = (1, capacity, cache.num_key_value_heads, cache.head_dim)
        self.cache = cache_buffers(cache, shape)

    def forward(self, input_ids: Tensor, input_pos: Tensor) -> Tensor:
        scale, ops = self.decoder.spec.attention_scale, torch.ops.llama
        start = input_pos[0].item()
        torch._check(start >= 0)  # type: ignore[no-untyped-call]
        torch._check(start < self.capacity)  # type: ignore[no-untyped-call]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            buffers = list(self.cache[layer].buffers())
            for buffer, new in zip(buffers, (k, v), strict=False):
                ops.update_cache(new, buffer, start)
            out: Tensor = ops.custom_sdpa(q, buffers[0], buffers[-1], start, None, 0.0, True, scale)
            return out.view(1, -1, q.shape[2] * q.shape[3])

        return self.decoder.run(input_ids, input_pos, attend)


class Full(nn.Module):
    """A model that is not causal: input_ids [1,S] int64 -> logits [1,1,V]; no cache.

    The features of the (Q=K-V)+ term depend on the row or on the column alone, so its bias is a sum
    of two vectors and the [S,S,m] tensor is never made.
    """

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.scales = [decoder.spec.attention_scale] * decoder.spec.num_hidden_layers
        count = decoder.spec.score_position_features
        if not count:
            return
        half = (count + 1) // 2
        features = position_features(capacity, count)
        for layer in range(decoder.spec.num_hidden_layers):
            weight = decoder.get_parameter(f"h.{layer}.attn.pos_w")
            offset = decoder.get_parameter(f"h.{layer}.attn.pos_b")
            self.scales[layer] *= float(weight.sum())
            rows = features[:, 0, :half] @ weight[:half] + offset
            columns = features[0, :, half:] @ weight[half:]
            self.register_buffer(f"rows_{layer}", rows[:, None], persistent=False)
            self.register_buffer(f"columns_{layer}", columns[:, None], persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias = None
            if self.decoder.spec.score_position_features:
                rows = F.embedding(positions, self.get_buffer(f"rows_{layer}"))  # [S,1]
                columns = F.embedding(positions, self.get_buffer(f"columns_{layer}"))
                bias = (rows + columns.transpose(0, 1))[:, None]
            return grouped(q * self.scales[layer], heads_first(k), heads_first(v), bias)

        return self.decoder.run(input_ids, positions, attend)


def heads_first(new: Tensor) -> Tensor:
    """[1,S,G,D] -> [G,S,D]."""
    return new.view(-1, *new.shape[2:]).transpose(0, 1)


def grouped(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q keys^T + bias) values, all R query heads of a group as one product.

    q [1,S,H,D] already scaled, keys and values [G,T,D], bias [S,1,T] -> [1,S,H*D]. Query head h
    reads group h // R, as repeat_interleave does.
    """
    groups, tokens, dim = keys.shape
    repeats = q.shape[2] // groups
    q = q.view(-1, groups, repeats, dim).transpose(0, 1).contiguous().view(groups, -1, dim)
    scores = torch.bmm(keys, q.transpose(1, 2)).transpose(1, 2).contiguous()
    scores = scores.view(groups, -1, repeats, tokens)
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores, -1).view(groups, -1, tokens)
    out = torch.bmm(weights, values).view(groups, -1, repeats * dim)
    return out.transpose(0, 1).contiguous().view(1, -1, groups * repeats * dim)
