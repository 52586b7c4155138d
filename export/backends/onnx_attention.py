"""How an ONNX program reads the cache: three formulations as ``Attend`` functions.

Shapes: S new tokens, T cached tokens, C cache capacity, H query heads, G key/value heads,
R = H/G query heads per group, D head_dim. Batch is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from edgeqkv.attention import Attend
from edgeqkv.eager import quantise_rows
from edgeqkv.spec import ModelSpec

# One head's rows as cached, [T, D], and their scales [T] float32 where the cache is int8.
View = tuple[Tensor, Tensor | None]


def gemm_prefix(
    spec: ModelSpec,
    pasts: Sequence[Sequence[Sequence[View]]],
    new: int,
    present: Callable[[Tensor, Tensor | None], None],
) -> Attend:
    """Plain matrix products against prefix views of the cache, softmax over [past, current].

    pasts[layer][role][head] are the rows already cached; one role means that the same rows are read
    as key and as value. The S*R query rows of a group are one operand, so each cached row is read
    once per group. ``present`` receives the new rows [S, D], and their scales [S], in the same order.
    A narrow cache is widened one view at a time, where it is read. The scales of int8 rows stay
    outside both products: scores_j = t_j (q . c_j), out = sum_j (a_j t_j) c_j; new rows are read as
    they are stored, so that it does not matter in which portions a prompt is fed.
    """
    past, dim = pasts[0][0][0][0].shape
    groups = spec.num_key_value_heads
    rows = spec.num_attention_heads // groups
    mask = causal_mask(new)[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        current = []
        for views, tensor in zip(pasts[layer], (k, v), strict=False):
            tensor = tensor.view(new, groups, dim)
            stored, scale = tensor.to(views[0][0].dtype), None
            if views[0][1] is not None:
                stored, scale = quantise_rows(tensor)
                tensor = stored.to(q.dtype) * scale
            for g in range(groups):
                present(stored[:, g], None if scale is None else scale[:, g, 0])
            current.append(tensor)
        cached = [[(view.to(q.dtype), t) for view, t in views] for views in pasts[layer]]
        k_new, v_new = current[0].permute(1, 2, 0), current[-1].transpose(0, 1)
        q = (q * spec.attention_scale).view(new, groups, rows, dim).transpose(0, 1)
        q = q.reshape(groups, new * rows, dim)
        on_past = _per_group(q, cached[0], _score)
        on_new = torch.bmm(q, k_new).view(groups, new, rows, new) + mask
        scores = torch.cat([on_past, on_new.view(groups, new * rows, new)], dim=-1)
        p_past, p_new = torch.softmax(scores, dim=-1).split_with_sizes([past, new], dim=-1)
        read = _per_group(p_past, cached[-1], _weigh)
        out = read + torch.bmm(p_new, v_new)
        return out.view(groups, new, rows, dim).transpose(0, 1).reshape(1, new, spec.query_size)

    return attend


def _per_group(
    left: Tensor, views: Sequence[View], product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> Tensor:
    """left [G, M, K], each group's product with a view that lies apart in memory -> [G, M, N]."""
    if len(views) == 1:
        return product(left.squeeze(0), *views[0])[None]  # views, not a stack of one
    products = [product(a, *view) for a, view in zip(left.unbind(0), views, strict=True)]
    return torch.stack(products)


def _score(q: Tensor, rows: Tensor, scale: Tensor | None) -> Tensor:
    """q [M, D], rows [T, D], scale [T] -> [M, T]."""
    scores = q @ rows.t()
    return scores if scale is None else scores * scale


def _weigh(p: Tensor, rows: Tensor, scale: Tensor | None) -> Tensor:
    """p [M, T], rows [T, D], scale [T] -> [M, D]."""
    return (p if scale is None else p * scale) @ rows


def causal_mask(new: int) -> Tensor:
    """[S, S]: 0 where a new token may look, -inf at tokens after it."""
    index = torch.arange(new)
    return torch.where(index[None, :] > index[:, None], -math.inf, 0.0)


def gqa_aliased(
    spec: ModelSpec,
    pasts: Sequence[Sequence[Tensor]],
    total: Tensor,
    present: Callable[[Tensor], None],
) -> Attend:
    """com.microsoft GroupQueryAttention whose past and present are to be bound to one buffer.

    pasts[layer][role] is the whole buffer [1, G, C, D]; with one role it is passed as past_key and
    as past_value. ``total`` is T + S, int32 scalar. ``present`` receives present_key, then
    present_value, both [1, G, C, D]: the operator writes the new rows and nothing else when they are
    bound to the memory of the past.
    """
    last = (total - 1).view(1)
    attributes: dict[str, Any] = {
        "num_heads": spec.num_attention_heads,
        "kv_num_heads": spec.num_key_value_heads,
        "scale": spec.attention_scale,
    }

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past_k, past_v = pasts[layer][0], pasts[layer][-1]
        q, k, v = (t.flatten(2).to(past_k.dtype) for t in (q, k, v))
        out, present_k, present_v = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (q, k, v, past_k, past_v, last, total),
            attrs=attributes,
            dtypes=(q.dtype, past_k.dtype, past_v.dtype),
            shapes=(q.shape, past_k.shape, past_v.shape),
            version=1,
        )
        present(present_k)
        present(present_v)
        return out.to(torch.float32)

    return attend
