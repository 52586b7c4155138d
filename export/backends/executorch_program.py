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

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_FORBIDDEN = -1e9  # added per position of the future; exp() of it is exactly 0


class _Layer(nn.Module):
    """The cache tensors of one layer, one buffer per role, all zeros."""

    def __init__(self, roles: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        for role in roles:
            self.register_buffer(role, torch.zeros(shape, dtype=dtype))


class _Cached(nn.Module):
    """input_ids [1,S] int64, input_pos [S] int64 -> logits [1,1,V] float32 of the last token.

    Buffers are named as ``CacheSpec.names()``.
    """

    def __init__(
        self, decoder: Decoder, cache: CacheSpec, capacity: int, shape: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.decoder, self.capacity, self.roles = decoder, capacity, cache.roles
        self.cache = nn.ModuleList(
            _Layer(cache.roles, shape, _DTYPES[cache.dtype]) for _ in range(cache.num_layers)
        )

    def buffers_of(self, layer: int) -> list[Tensor]:
        return [self.cache[layer].get_buffer(role) for role in self.roles]


class Plain(_Cached):
    """Portable aten operators only. One buffer is [G,C,D].

    Rows are written in place; the whole capacity is multiplied and what is after a token's own
    position is masked, so cost follows C. The scores are cache @ q^T, because XNNPACK repacks the
    second operand of a product on each call and the cache is the large one.
    """

    def __init__(self, decoder: Decoder, cache: CacheSpec, capacity: int) -> None:
        shape = (cache.num_key_value_heads, capacity, cache.head_dim)
        super().__init__(decoder, cache, capacity, shape)
        self.register_buffer("columns", torch.arange(capacity).float(), persistent=False)

    def forward(self, input_ids: Tensor, input_pos: Tensor) -> Tensor:
        scale = self.decoder.spec.attention_scale
        ahead = torch.relu(self.get_buffer("columns") - input_pos.float()[:, None, None])
        bias = ahead * _FORBIDDEN  # [S,1,C]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            read = []
            for buffer, new in zip(self.buffers_of(layer), (k, v), strict=False):
                rows = heads_first(new).to(buffer.dtype)
                torch.ops.aten.index_put_(buffer, [None, input_pos], rows)
                read.append(buffer.to(new.dtype))
            return grouped(q * scale, read[0], read[-1], bias)

        return self.decoder.run(input_ids, input_pos, attend)


class Custom(_Cached):
    """ExecuTorch's LLM operators. One buffer is [1,C,G,D]; cost follows the position."""

    def __init__(self, decoder: Decoder, cache: CacheSpec, capacity: int) -> None:
        shape = (1, capacity, cache.num_key_value_heads, cache.head_dim)
        super().__init__(decoder, cache, capacity, shape)

    def forward(self, input_ids: Tensor, input_pos: Tensor) -> Tensor:
        scale, ops = self.decoder.spec.attention_scale, torch.ops.llama
        start = input_pos[0].item()
        torch._check(start >= 0)  # type: ignore[no-untyped-call]
        torch._check(start < self.capacity)  # type: ignore[no-untyped-call]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            buffers = self.buffers_of(layer)
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
        count = decoder.spec.score_position_features
        if not count:
            return
        half = (count + 1) // 2
        features = position_features(capacity, count)
        for layer in range(decoder.spec.num_hidden_layers):
            weight = decoder.get_parameter(f"h.{layer}.attn.pos_w")
            offset = decoder.get_parameter(f"h.{layer}.attn.pos_b")
            rows = features[:, 0, :half] @ weight[:half] + offset
            columns = features[0, :, half:] @ weight[half:]
            self.register_buffer(f"rows_{layer}", rows[:, None], persistent=False)
            self.register_buffer(f"columns_{layer}", columns[:, None], persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        spec = self.decoder.spec
        positions = torch.arange(input_ids.shape[1])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scale, bias = spec.attention_scale, None
            if spec.score_position_features:
                scale *= float(self.decoder.get_parameter(f"h.{layer}.attn.pos_w").sum())
                rows = F.embedding(positions, self.get_buffer(f"rows_{layer}"))  # [S,1]
                columns = F.embedding(positions, self.get_buffer(f"columns_{layer}"))
                bias = (rows + columns.transpose(0, 1))[:, None]
            return grouped(q * scale, heads_first(k), heads_first(v), bias)

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
