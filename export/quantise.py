"""Turn a recipe into integers: once, in torch, before any backend sees the model.

Symmetric, one scale per group of input columns: w[o, i] ~ q[o, i] * scale[o, i // group_size], q in
[-2^(bits-1), 2^(bits-1) - 1]. Every backend stores the same integers and scales in its own
packing, so a difference between backends is never a difference of quantisation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from edgeqkv.errors import UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quant import GROUPED, SCHEMES, QuantRecipe, check_groups, matrices

FLOAT16_MAX = 65504.0


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
        groups = self.q.view(out, -1, self.group_size).float() * self.scale.float()[..., None]
        return groups.view(out, into)


def storable(scale: Tensor) -> Tensor:
    """The nearest positive scales that float16 and bfloat16 both hold exactly, as float16."""
    return scale.clamp(2.0**-24, 2.0**15).bfloat16().half()


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> QuantTensor:
    """weight [out, in] float32; the largest magnitude of a group maps to the end of the range."""
    out, into = weight.shape
    groups = weight.float().view(out, into // group_size, group_size)
    most = 2 ** (bits - 1)
    scale = storable(groups.abs().amax(-1) / (most - 1))
    q = (groups / scale.float()[..., None]).round().clamp(-most, most - 1)
    return QuantTensor(q.to(torch.int8).view(out, into), scale, bits, group_size)


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
