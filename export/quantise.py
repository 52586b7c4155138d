"""Turn a recipe into integers: once, in torch, before any backend sees the model.

Symmetric, one scale per group of input columns: w[o, i] ~ q[o, i] * scale[o, i // group_size], q in
[-2^(bits-1), 2^(bits-1) - 1]. Every backend stores the same integers and scales in its own
packing, so a difference between backends is never a difference of quantisation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from edgeqkv.errors import UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quant import GROUPED, SCHEMES, QuantRecipe, check_groups, matrices

FLOAT16_MAX = 65504.0
CLIPPING = tuple(1 - 0.025 * i for i in range(13))  # of the scale that clips nothing
ROWS = 4096  # rows of a matrix that are worked on at a time


@dataclasses.dataclass(frozen=True)
class QuantTensor:
    """q [out, in] int8 (also for 4 bits), scale [out, in / group_size] float16, positive.

    Scales have bfloat16's 8 significant bits as well, because XNNPACK keeps the scales of 4-bit
    groups in bfloat16: no runtime rounds them again.
    """

    q: Tensor
    scale: Tensor
    bits: int
    group_size: int

    def dequantise(self) -> Tensor:
        """[out, in] float32."""
        out, into = self.q.shape
        groups = self.q.view(out, -1, self.group_size).float()
        groups *= self.scale.float()[..., None]
        return groups.view(out, into)

    def largest(self) -> float:
        """The largest magnitude that it holds, found without its floats."""
        groups = self.q.view(self.q.shape[0], -1, self.group_size)
        most = torch.maximum(groups.amax(-1).float(), -groups.amin(-1).float())
        return float((most * self.scale.float()).max())


def storable(scale: Tensor) -> Tensor:
    """The nearest positive scales that float16 and bfloat16 both hold exactly, as float16."""
    return scale.clamp(2.0**-24, 2.0**15).bfloat16().half()


def best_scales(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """weight [out, in] -> scale [out, in / group_size] float32, storable.

    8 bits: the largest magnitude of a group maps to the end of the range. 4 bits: of that scale and
    smaller ones, which clip it, the one with the least squared error; on the trained checkpoints
    that takes a tenth off the error of the weights. For 8 bits it changes nothing.
    """
    out, into = weight.shape
    groups = weight.float().view(out, into // group_size, group_size)
    widest = groups.abs().amax(-1) / (2 ** (bits - 1) - 1)
    best, least = storable(widest).float(), torch.full_like(widest, torch.inf)
    for fraction in CLIPPING if bits == 4 else ():
        scale = storable(widest * fraction).float()
        error = (nearest(groups, scale, bits) * scale[..., None] - groups).square_().sum(-1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def nearest(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    """groups [out, n, group_size], scale [out, n] -> the integers, as floats."""
    most = 2 ** (bits - 1)
    return (groups / scale[..., None]).round_().clamp_(-most, most - 1)


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> QuantTensor:
    """weight [out, in]; a block of rows at a time, so that a large embedding needs no second copy."""
    q = torch.empty(weight.shape, dtype=torch.int8)
    scales = []
    for rows, part in zip(torch.split(weight, ROWS), torch.split(q, ROWS), strict=True):
        scale = best_scales(rows, bits, group_size)
        groups = rows.float().view(len(rows), -1, group_size)
        part.copy_(nearest(groups, scale, bits).view(rows.shape))
        scales.append(scale.half())
    return QuantTensor(q, torch.cat(scales), bits, group_size)


def quantise(decoder: Decoder, recipe: QuantRecipe) -> dict[str, QuantTensor]:
    """Module name -> integers, for the modules that the recipe stores in int8 or int4.

    Raises:
        UnsupportedError: a module's input width is not a multiple of its group size.
    """
    check_groups(decoder.spec, recipe)
    found = {}
    for module in matrices(decoder.spec):
        rule = recipe.rule_for(module)
        if rule.weights in GROUPED:
            weight = decoder.get_parameter(f"{module}.weight")
            columns = rule.columns(weight.shape[1])
            found[module] = round_to_nearest(weight, SCHEMES[rule.weights], columns)
    return found


def apply_rounding(
    decoder: Decoder, recipe: QuantRecipe, tensors: Mapping[str, QuantTensor]
) -> None:
    """Overwrite weights by what their stored form means, in place: the model that is then exported.

    Raises:
        UnsupportedError: a weight that the recipe stores as fp16 exceeds its range.
    """
    with torch.no_grad():
        for module in matrices(decoder.spec):
            weight = decoder.get_parameter(f"{module}.weight")
            if module in tensors:
                weight.copy_(tensors[module].dequantise())
            elif recipe.rule_for(module).weights == "fp16":
                if (largest := float(weight.abs().max())) > FLOAT16_MAX:
                    raise UnsupportedError(
                        f"{module} holds {largest:.3g}, beyond float16's {FLOAT16_MAX:.0f}; "
                        "give it fp32 in a --recipe"
                    )
                weight.copy_(weight.half())


def drop_floats(decoder: Decoder, tensors: Mapping[str, QuantTensor]) -> None:
    """Leave the matrices of ``tensors`` a shape and no memory, in place: lowering reads the integers.

    The other weights become copies: one view left of a checkpoint's mapping keeps all of it.
    """
    for path, module in decoder.named_modules() if tensors else ():
        for name, weight in list(module.named_parameters(recurse=False)):
            dropped = name == "weight" and path in tensors
            kept = torch.empty_like(weight, device="meta") if dropped else weight.detach().clone()
            setattr(module, name, nn.Parameter(kept, requires_grad=False))
