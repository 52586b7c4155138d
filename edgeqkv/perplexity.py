"""A whole text through the decoder at the speed of training: fused causal attention, no cache."""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from edgeqkv.attention import Attend
from edgeqkv.model import Decoder
from edgeqkv.spec import ModelSpec


def causal_attend(spec: ModelSpec) -> Attend:
    """Attention over a whole sequence in PyTorch's fused kernel, with no mask tensor."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = q.shape[2] // k.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.attention_scale)
        return out.transpose(1, 2).flatten(2)

    return attend


def logits(model: Decoder, ids: Tensor, positions: Tensor) -> Tensor:
    """ids [B, S], positions [S] int64 -> logits [B, S, vocab_size] float32; forward, but faster."""
    states = model.hidden(ids, positions, causal_attend(model.spec))
    return F.linear(states, model.head_weight)


@torch.no_grad()
def evaluate(model: Decoder, tokenizer: Tokenizer, text: str) -> dict[str, float]:
    """Loss (nats per token), perplexity per token and bits per byte of ``text``.

    The text is read in consecutive windows of the model's context, so a token sees between 0 and
    context - 1 tokens before its predecessor. The first token is only read. Probabilities are over
    the tokens that exist, not the padding of the vocabulary. ``edgeqkv eval`` computes the same.
    """
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids = torch.tensor(encoding.ids)
    context, total = model.spec.max_position_embeddings, 0.0
    for start in range(0, len(ids) - 1, context):
        window = ids[start : start + context + 1]
        out = logits(model, window[None, :-1], torch.arange(len(window) - 1))[0]
        out = out[:, : model.spec.used_tokens]
        total += F.cross_entropy(out, window[1:], reduction="sum").item()
    loss = total / (len(ids) - 1)
    predicted = len(text[encoding.offsets[0][1] :].encode())
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": total / math.log(2) / predicted,
        "tokens": len(ids) - 1,
    }
