"""The traced programs behind ``to_coreml``: a decoder that keeps its cache in Core ML states.

Everything here follows from how Core ML treats states; each choice names the report it avoids.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgeqkv.attention import position_features
from edgeqkv.cache import CacheSpec
from edgeqkv.model import Decoder

# Added to the score of a slot that a token may not see. exp() of it is 0 in float16 and float32,
# and unlike -inf it cannot turn into NaN (-inf - -inf) whatever a kernel does first.
MASKED = -1e4


def state_names(cache: CacheSpec) -> list[str]:
    """``cache.names()`` as MIL identifiers: ``cache_0_kv`` or ``cache_0_key``, ``cache_0_value``."""
    return [name.replace(".", "_") for name in cache.names()]


class StatefulDecoder(nn.Module):
    """``(input_ids [1, S] int32, positions [S] int32) -> logits [1, 1, vocab_size]`` of the last token.

    One buffer ``[1, capacity, num_key_value_heads * head_dim]`` float16 per cache tensor becomes a
    Core ML state. It is token-major, so the projection's rows are written as they are: a transpose
    between projection and update makes the program fail to load for S > 1 (coremltools#2278,
    #2275). Heads are split when the cache is read, and not at all for one key/value head.
    """

    slots: Tensor

    def __init__(self, decoder: Decoder, cache: CacheSpec) -> None:
        super().__init__()
        self.decoder, self.cache = decoder, cache
        shape = (1, cache.capacity, cache.num_key_value_heads * cache.head_dim)
        for name in state_names(cache):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float16))
        self.register_buffer("slots", torch.arange(cache.capacity, dtype=torch.int32))

    def write(self, layer: int, role: str, rows: Tensor, positions: Tensor) -> Tensor:
        """Store rows [1,S,G,D] at ``positions``; returns the whole cache as [G,T,D] (T = capacity)."""
        state: Tensor = self.get_buffer(f"cache_{layer}_{role}")
        state[:, positions[0] : positions[-1] + 1] = rows.flatten(2).to(torch.float16)
        groups = self.cache.num_key_value_heads
        cached = state.to(rows.dtype)
        if groups == 1:
            return cached
        return cached.view(self.cache.capacity, groups, self.cache.head_dim).transpose(0, 1)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        spec, slots = self.decoder.spec, self.cache.capacity
        hidden = (self.slots[None] > positions[:, None]).to(torch.float32)
        mask = (hidden * MASKED).view(1, -1, 1, slots)

        heads, groups = spec.num_attention_heads, spec.num_key_value_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # The query heads of a group become rows of one matmul: the cache is read once per
            # group, never repeated. [1,S,H,D] -> [G, S*H/G, D], a plain reshape when G is 1.
            keys, *other = (
                self.write(layer, role, v if role == "value" else k, positions)
                for role in self.cache.roles
            )
            values = other[0] if other else keys
            q = q * spec.attention_scale
            if groups > 1:
                q = q.reshape(-1, groups, heads // groups, spec.head_dim).transpose(0, 1)
            scores = q.reshape(groups, -1, spec.head_dim) @ keys.transpose(1, 2)
            scores = scores.view(groups, -1, heads // groups, slots) + mask
            out = scores.softmax(-1).view(groups, -1, slots) @ values
            if groups > 1:
                out = out.view(groups, -1, heads // groups, spec.head_dim).transpose(0, 1)
            return out.reshape(1, -1, spec.query_size)

        return self.decoder.run(input_ids, positions, attend)


class StatelessDecoder(nn.Module):
    """The same inputs and output for a model that is not causal: the whole sequence at once.

    The position term of (Q=K-V)+ (arXiv 2606.04032) is a row term, a column term and a constant.
    Softmax over a row cancels all but the column term, so each layer stores that vector alone.
    """

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        super().__init__()
        self.decoder = decoder
        if m := decoder.spec.score_position_features:
            features = position_features(capacity, m)
            half = (m + 1) // 2
            for i in range(decoder.spec.num_hidden_layers):
                pos_w = decoder.get_parameter(f"h.{i}.attn.pos_w").detach()
                self.register_buffer(f"column_{i}", features[0, :, half:] @ pos_w[half:])

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        spec = self.decoder.spec
        heads, groups = spec.num_attention_heads, spec.num_key_value_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scale = spec.attention_scale
            if spec.score_position_features:
                scale *= float(self.decoder.get_parameter(f"h.{layer}.attn.pos_w").sum())
            keys, values = (t.squeeze(0).transpose(0, 1).unsqueeze(1) for t in (k, v))  # [G,1,S,D]
            q = (q.squeeze(0) * scale).transpose(0, 1)
            q = q.reshape(groups, heads // groups, -1, spec.head_dim)
            scores = q @ keys.transpose(2, 3)
            if spec.score_position_features:
                scores = scores + self.get_buffer(f"column_{layer}")[positions]
            out = (scores.softmax(-1) @ values).reshape(heads, -1, spec.head_dim)
            return out.transpose(0, 1).reshape(1, -1, spec.query_size)

        return self.decoder.run(input_ids, positions, attend)
