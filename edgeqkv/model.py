"""The one decoder that covers every variant, written so that torch.export can trace it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgeqkv.attention import (
    Attend,
    Attention,
    causal_bias,
    position_features,
    positional_scores,
    scores_softmax_values,
)
from edgeqkv.spec import ModelSpec


def layer_norm(spec: ModelSpec) -> nn.LayerNorm:
    return nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps, bias=spec.layer_norm_bias)


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.c_fc = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.linear_bias)
        self.c_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.linear_bias)
        self.approximate = "tanh" if spec.hidden_act == "gelu_new" else "none"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))
        return out


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.ln_1 = layer_norm(spec)
        self.attn = Attention(spec, layer)
        self.ln_2 = layer_norm(spec)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self.attn(self.ln_1(x), attend)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Decoder(nn.Module):
    """``model(input_ids)`` -> logits [B, S, vocab_size] float32; state_dict keys as in
    ``spec.parameter_shapes()``.

    A backend calls :meth:`run` with its own attention instead of :meth:`forward`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.wte = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.wpe = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.h = nn.ModuleList(Block(spec, i) for i in range(spec.num_hidden_layers))
        self.ln_f = layer_norm(spec)
        if not spec.tie_word_embeddings:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """The output head [vocab_size, hidden_size]: the embedding itself when tied."""
        return self.wte.weight if self.spec.tie_word_embeddings else self.lm_head.weight

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids [B,S] int64, positions [S] int64 -> final normalised states [B,S,hidden_size]."""
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.h:
            x = block(x, attend)
        out: Tensor = self.ln_f(x)
        return out

    def run(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits of the last token only [B, 1, vocab_size]: what prefill and decode need."""
        return F.linear(self.hidden(input_ids, positions, attend)[:, -1:], self.head_weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, S] int64 -> logits [B, S, vocab_size] at every position, no cache."""
        length = input_ids.shape[1]
        states = self.hidden(input_ids, torch.arange(length), self.eager_attend(length))
        return F.linear(states, self.head_weight)

    def eager_attend(self, length: int) -> Attend:
        """The reference reading of a whole sequence of ``length`` tokens."""
        spec = self.spec
        if spec.score_position_features:
            features = position_features(length, spec.score_position_features)

            def positional(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                pos_w = self.get_parameter(f"h.{layer}.attn.pos_w")
                pos_b = self.get_parameter(f"h.{layer}.attn.pos_b")
                scale = spec.attention_scale
                return positional_scores(q, k, v, scale, features, pos_w, pos_b)

            return positional
        bias = causal_bias(0, length) if spec.is_causal else None

        def plain(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scores_softmax_values(q, k, v, spec.attention_scale, bias)

        return plain
