"""How an ONNX program reads the cache: three formulations as ``Attend`` functions.

Shapes: S new tokens, T cached tokens, C cache capacity, H query heads, G key/value heads,
R = H/G query heads per group, D head_dim. Batch is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edgeqkv.attention import Attend


def gemm_prefix(
    pasts: Sequence[Sequence[Sequence[Tensor]]], scale: float, present: Callable[[Tensor], None]
) -> Attend:
    """Plain matrix products against prefix views of the cache, softmax over [past, current].

    pasts[layer][role][head] is a view [T, D] of the rows already cached; one role means that the
    same rows are read as key and as value. All R query heads of a group are the rows of one GEMM,
    so each cached row is read once per group. ``present`` receives the new rows [S, D] in the same
    order. A half-precision cache is cast one view at a time, right where it is read.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, new, heads, dim = q.shape
        groups = k.shape[2]
        rows = heads // groups
        views = pasts[layer]
        current = [t.view(new, groups, dim) for t in ((k,) if len(views) == 1 else (k, v))]
        for role, tensor in zip(views, current, strict=True):
            for past, row in zip(role, tensor.unbind(1), strict=True):
                present(row.to(past.dtype))
        reads = [[past.to(q.dtype) for past in role] for role in views]
        k_new, v_new = (t.transpose(0, 1) for t in (current[0], current[-1]))
        # [G, R*S, D], query head major; the scale costs least here.
        q = (q * scale).view(new, groups, rows, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim)
        on_past = torch.stack([q[g] @ past.transpose(0, 1) for g, past in enumerate(reads[0])])
        on_new = (q @ k_new.transpose(1, 2)).view(groups, rows, new, new) + causal_mask(new)
        scores = torch.cat([on_past, on_new.view(groups, rows * new, new)], dim=-1)
        p_past, p_new = torch.softmax(scores, dim=-1).split([reads[0][0].shape[0], new], dim=-1)
        out = torch.stack([p_past[g] @ past for g, past in enumerate(reads[-1])]) + p_new @ v_new
        return out.view(groups, rows, new, dim).permute(2, 0, 1, 3).reshape(1, new, heads * dim)

    return attend


def causal_mask(new: int) -> Tensor:
    """[S, S]: 0 where a new token may look, -inf at tokens after it."""
    index = torch.arange(new)
    return torch.where(index[None, :] > index[:, None], -math.inf, 0.0)


def gqa_aliased(
    pasts: Sequence[Sequence[Tensor]],
    total: Tensor,
    scale: float,
    present: Callable[[Tensor], None],
) -> Attend:
    """com.microsoft GroupQueryAttention whose past and present are to be bound to one buffer.

    pasts[layer][role] is the whole buffer [1, G, C, D]; with one role it is passed as past_key and
    as past_value. ``total`` is T + S, int32 scalar. ``present`` receives present_key, then
    present_value, both [1, G, C, D]: the operator writes the new rows and nothing else when they are
    bound to the memory of the past.
    """
    last = (total - 1).view(1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past_k, past_v = pasts[layer][0], pasts[layer][-1]
        heads, groups = q.shape[2], k.shape[2]
        q, k, v = (t.flatten(2).to(past_k.dtype) for t in (q, k, v))
        out, present_k, present_v = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (q, k, v, past_k, past_v, last, total),
            attrs={"num_heads": heads, "kv_num_heads": groups, "scale": scale},
            dtypes=(q.dtype, past_k.dtype, past_v.dtype),
            shapes=(q.shape, past_k.shape, past_v.shape),
            version=1,
        )
        present(present_k)
        present(present_v)
        return out.to(torch.float32)

    return attend
