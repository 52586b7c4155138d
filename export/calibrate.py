"""GPTQ: integers chosen so that a layer's output, not its weight, is closest on calibration text.

Frantar et al., arXiv 2210.17323, as written there except that scales come from
``quantise.best_scales`` and that a tied embedding has two jobs (see :func:`calibrate`). Layers are
done one after the other, each on the inputs that the rounded layers before it give, so no more
than one layer's statistics are held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from edgeqkv.attention import Attend
from edgeqkv.errors import TextError, UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quant import GROUPED, SCHEMES, Quantisation, QuantRecipe, check_groups
from export.quantise import (
    ROWS,
    QuantTensor,
    apply_rounding,
    best_scales,
    quantise,
    round_to_nearest,
)
from export.rotate import rotate_cache

WINDOWS, LENGTH = 64, 256  # calibration reads at most this many windows of so many tokens
LEAST = 1024  # fewer tokens say nothing about a matrix of a thousand columns
BATCH = 8  # windows that are run at a time
DAMPING = 0.01  # of the mean of the Hessian's diagonal (the paper's)
COLUMNS = 128  # columns whose error is passed on together (the paper's lazy batch)
# Weight of the embedding's own error beside the head's in a tied matrix. Measured on two models of
# 1 M parameters, KL to the unrounded model in 1e-3 nats: 0 loses (7.2, embedding left to rounding),
# 0.1 2.8 and 2.7, 0.3 2.8 and 2.6, 1 2.9 and 3.0, 10 4.1.
EMBEDDING = 0.3


def prepare(
    decoder: Decoder,
    recipe: QuantRecipe,
    *,
    text: Path | None = None,
    ids: Sequence[int] = (),
    rotate: bool = False,
    report: Callable[[str], None] = lambda done: None,
) -> tuple[dict[str, QuantTensor], Quantisation]:
    """All that is done to the weights before lowering, in place: rotate the cache, then round.

    ``text`` and its token ``ids`` are what GPTQ and the rotation read; without them the integers are
    the nearest and the rotation is orthogonal. Gives the integers and what the manifest says of them.
    """
    positions = decoder.spec.max_position_embeddings
    windows = None if text is None else calibration_windows(ids, positions)
    if rotate:
        rotate_cache(decoder, windows)
    integers = bool(recipe.schemes & set(GROUPED))
    if windows is not None and integers:
        tensors, method = calibrate(decoder, recipe, windows, report), "gptq"
    else:
        tensors, method = quantise(decoder, recipe), "rtn" if integers else "none"
        apply_rounding(decoder, recipe, tensors)
    return tensors, Quantisation(
        recipe=recipe,
        method=method,
        calibration_sha256=None if text is None else hashlib.sha256(text.read_bytes()).hexdigest(),
        calibration_tokens=None if windows is None else windows.numel(),
        cache_rotation=("hadamard" if windows is None else "balanced") if rotate else "none",
    )


def calibration_windows(ids: Sequence[int], positions: int) -> Tensor:
    """[N, T] int64: windows spread evenly over the whole text.

    Raises:
        TextError: it is too short.
    """
    length = min(LENGTH, positions)
    if len(ids) < max(LEAST, length):
        raise TextError(
            f"the calibration text has {len(ids)} tokens, needed: {max(LEAST, length)}; give a longer "
            "one"
        )
    count = min(WINDOWS, len(ids) // length)
    starts = torch.linspace(0, len(ids) - length, count).long()
    return torch.stack([torch.tensor(ids[s : s + length]) for s in starts.tolist()])


def calibrate(
    decoder: Decoder,
    recipe: QuantRecipe,
    windows: Tensor,
    report: Callable[[str], None] = lambda done: None,
) -> dict[str, QuantTensor]:
    """Quantise by GPTQ and round the decoder in place, as ``quantise`` and ``apply_rounding`` do.

    windows: [N, T] int64. ``report`` hears the name of each layer, and ``head``, as it begins.

    A tied matrix E is head and embedding at once: its Hessian is that of the final states, scaled to
    mean diagonal 1, plus EMBEDDING times the identity, for which an embedding's row is read alone.

    Raises:
        UnsupportedError: as ``quantise`` and ``apply_rounding``.
    """
    spec = decoder.spec
    check_groups(spec, recipe)
    length = windows.shape[1]
    attend, positions = decoder.eager_attend(length), torch.arange(length)
    found: dict[str, QuantTensor] = {}

    def fit(module: str, hessian: Tensor | None) -> None:
        rule = recipe.rule_for(module)
        if rule.weights not in GROUPED:
            return
        weight = decoder.get_parameter(f"{module}.weight")
        bits, size = SCHEMES[rule.weights], rule.columns(weight.shape[1])
        found[module] = (
            round_to_nearest(weight, bits, size)
            if hessian is None
            else gptq(weight, hessian, bits, size)
        )
        weight.copy_(found[module].dequantise())

    with torch.no_grad():
        report("GPTQ of the head")
        head = second_moment(
            decoder.hidden(batch, positions, attend) for batch in torch.split(windows, BATCH)
        )
        head /= head.diagonal().mean()
        apply_rounding(decoder, recipe, {})  # what stays float16
        fit("wpe", None)
        fit("wte", head + EMBEDDING * torch.eye(len(head)) if spec.tie_word_embeddings else None)
        states = decoder.wte(windows) + decoder.wpe(positions)
        for i, block in enumerate(decoder.h):
            report(f"GPTQ of layer {i}")
            for name, hessian in input_moments(block, states, attend).items():
                fit(f"h.{i}.{name}", hessian)
            for batch in torch.split(states, BATCH):
                batch.copy_(block(batch, attend))
        if not spec.tie_word_embeddings:
            fit("lm_head", head)
    return found


def second_moment(inputs: Iterable[Tensor]) -> Tensor:
    """Sum of x x^T over all rows of tensors [..., D] -> [D, D]."""
    total: Tensor | None = None
    for x in inputs:
        flat = x.flatten(0, -2)
        total = flat.T @ flat if total is None else total.addmm_(flat.T, flat)
    assert total is not None
    return total


def input_moments(block: nn.Module, states: Tensor, attend: Attend) -> dict[str, Tensor]:
    """Second moment of the input of each linear layer of a block, by the layer's name in it."""
    moments: dict[str, Tensor] = {}
    hooks = []
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):

            def add(module: nn.Module, inputs: tuple[Tensor], name: str = name) -> None:
                x = inputs[0].flatten(0, -2)
                if name not in moments:
                    moments[name] = x.new_zeros(x.shape[1], x.shape[1])
                moments[name].addmm_(x.T, x)

            hooks.append(module.register_forward_pre_hook(add))
    try:
        for batch in torch.split(states, BATCH):
            block(batch, attend)
    finally:
        for hook in hooks:
            hook.remove()
    return moments


def gptq(weight: Tensor, hessian: Tensor, bits: int, group_size: int) -> QuantTensor:
    """weight [out, in], hessian [in, in] of its input; columns in order of falling importance.

    Minimises tr((W - Q) H (W - Q)^T) greedily: a column is rounded and its error made good by the
    columns still to come. Scales are fixed before, so that the order may cross groups.
    """
    out, into = weight.shape
    most = 2 ** (bits - 1)
    order = torch.argsort(hessian.diagonal(), descending=True)
    factor = inverse_cholesky(hessian[order][:, order])
    q = torch.empty(out, into, dtype=torch.int8)
    scales = []
    for rows, stored in zip(torch.split(weight, ROWS), torch.split(q, ROWS), strict=True):
        scale = best_scales(rows, bits, group_size)
        # Transposed [in, rows]: what one step works on is contiguous.
        steps = scale.repeat_interleave(group_size, 1).T[order]
        left = rows.float().T[order]
        rounded = torch.empty_like(left)
        for start in range(0, into, COLUMNS):
            stop = min(start + COLUMNS, into)
            errors = torch.empty(stop - start, len(rows))
            for j in range(start, stop):
                rounded[j] = (left[j] / steps[j]).round_().clamp_(-most, most - 1)
                errors[j - start] = (left[j] - rounded[j] * steps[j]) / factor[j, j]
                left[j + 1 : stop].addr_(factor[j, j + 1 : stop], errors[j - start], alpha=-1)
            left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
        stored[:, order] = rounded.T.to(torch.int8)
        scales.append(scale.half())
    return QuantTensor(q, torch.cat(scales), bits, group_size)


def inverse_cholesky(hessian: Tensor) -> Tensor:
    """Upper U with U^T U = (H + damping)^-1; more damping where H is still singular.

    Raises:
        UnsupportedError: H is not finite: the model overflows on the calibration text.
    """
    if not torch.isfinite(hessian).all():
        raise UnsupportedError("the model gives infinite or NaN values on the calibration text")
    identity = hessian.diagonal().mean().clamp_min(1e-30) * torch.eye(len(hessian))
    damping = DAMPING
    while True:
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * identity)
        if not failed:
            inverse: Tensor = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                found: Tensor = upper
                return found
        damping *= 10
