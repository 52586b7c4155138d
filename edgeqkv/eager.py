"""The eager model read through a cache of a given number format: the reference for what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from edgeqkv.attention import Attend, causal_bias, scores_softmax_values
from edgeqkv.evaluate import BLOCK, Rows
from edgeqkv.model import Decoder
from edgeqkv.spec import ModelSpec


def quantise_rows(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """x [..., D] -> q [..., D] int8 and scale [..., 1] float32: symmetric, one scale per row.

    x ~ q * scale, scale = max|row| / (2^(bits-1) - 1); a row of zeros gets scale 0 and q 0.
    """
    most = 2 ** (bits - 1) - 1
    scale = x.float().abs().amax(-1, keepdim=True) / most
    q = (x / torch.where(scale > 0, scale, 1.0)).round().clamp(-most, most)
    return q.to(torch.int8), scale


def int8_attend(spec: ModelSpec, length: int, bits: int = 8) -> Attend:
    """Reading of a whole sequence through an int8 cache, its scales folded out of both products.

    scores_j = t_j (q . c_j), out = sum_j (a_j t_j) c_j, with c_j the int8 row and t_j its scale.
    Every row is read as stored, the newest too. ``bits`` 4 shows what a 4-bit cache would cost.
    """
    bias = causal_bias(0, length)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = q.shape[2] // k.shape[2]
        c_k, t_k = quantise_rows(k, bits)
        c_v, t_v = (c_k, t_k) if v is k else quantise_rows(v, bits)
        c_k, t_k, c_v, t_v = (
            t.transpose(1, 2).repeat_interleave(repeats, 1) for t in (c_k, t_k, c_v, t_v)
        )
        scores = q.transpose(1, 2) @ c_k.float().transpose(2, 3) * t_k.transpose(2, 3)
        a = torch.softmax(scores * spec.attention_scale + bias, dim=-1)
        out = (a * t_v.transpose(2, 3)) @ c_v.float()
        return out.transpose(1, 2).flatten(2)

    return attend


def cached_attend(spec: ModelSpec, length: int, dtype: str) -> Attend:
    """Causal attention over ``length`` tokens whose keys and values pass through a cache of ``dtype``."""
    if dtype == "int8":
        return int8_attend(spec, length)
    bias = causal_bias(0, length)
    stored = {"fp32": torch.float32, "fp16": torch.float16}[dtype]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.to(stored).to(q.dtype) for t in (k, v))
        return scores_softmax_values(q, k, v, spec.attention_scale, bias)

    return attend


def logits(decoder: Decoder, input_ids: Tensor, attend: Attend) -> Tensor:
    """input_ids [B, S] -> logits [B, S, vocab_size], attention read by ``attend``."""
    states = decoder.hidden(input_ids, torch.arange(input_ids.shape[1]), attend)
    return F.linear(states, decoder.head_weight)


def eager_rows(decoder: Decoder, attend: Callable[[ModelSpec, int], Attend] | None = None) -> Rows:
    """The model as ``edgeqkv.evaluate`` takes one; ``attend(spec, length)`` replaces its attention.

    The head is applied to a block of states at a time: [S, vocab_size] would not fit for 50,304 ids.
    """

    def rows(ids: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
        length = len(ids)
        chosen = decoder.eager_attend(length) if attend is None else attend(decoder.spec, length)
        with torch.inference_mode():
            states = decoder.hidden(torch.from_numpy(ids)[None], torch.arange(length), chosen)[0]
            for start in range(0, length, BLOCK):
                yield from F.linear(states[start : start + BLOCK], decoder.head_weight).numpy()

    return rows
