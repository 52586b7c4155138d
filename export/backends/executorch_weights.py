"""Integer weights in ExecuTorch's forms, from the integers we have: nothing is rounded again.

A matrix becomes torchao's ``IntxUnpackedToInt8Tensor``, whose product XNNPACK runs on activations
that it rounds to 8 bits as it goes, one scale and zero point per token (``8da4w``, ``8da8w``): it
has no 4-bit kernel for float activations with more than one scale per row. An embedding becomes
ExecuTorch's quantised lookup, an operator of its ``quantized`` kernel library.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgeqkv.errors import UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quant import QuantRecipe, matrices
from edgeqkv.spec import ModelSpec
from export.lowering import shared_copy
from export.quantise import QuantTensor

GROUP_MULTIPLE = 32  # of a group of 4-bit weights, XNNPACK's condition
ACTIVATIONS = "int8_asym_per_token"  # torchao's name


def check_recipe(model: ModelSpec, recipe: QuantRecipe) -> None:
    """Raises UnsupportedError for the first module whose number format this backend lacks."""
    shapes = model.parameter_shapes()
    lookups = {"wpe"} if model.tie_word_embeddings else {"wpe", "wte"}
    for module in matrices(model):
        rule, width = recipe.rule_for(module), shapes[f"{module}.weight"][1]
        columns = rule.columns(width)
        possible = {
            "fp32": True,
            "fp16": module in lookups,
            "int8": columns == width,
            "int4": columns % GROUP_MULTIPLE == 0,
        }
        if not possible[rule.weights]:
            groups = f" with {columns} columns per scale" if rule.weights != "fp16" else ""
            raise UnsupportedError(
                f"executorch: {module} as {rule.weights}{groups} is not supported; allowed: fp32, "
                f"int8 with one scale per row, int4 in groups of a multiple of {GROUP_MULTIPLE}, "
                f"fp16 for {' and '.join(sorted(lookups))} only"
            )


def with_stored_weights(
    decoder: Decoder, recipe: QuantRecipe, tensors: Mapping[str, QuantTensor]
) -> Decoder:
    """The decoder as the recipe stores it; tensors that stay float32 are shared with it.

    Call with torchao and ``executorch.exir`` importable: the latter defines the lookup operators.
    """
    changed = shared_copy(decoder)
    for name in matrices(decoder.spec):
        module, tensor = changed.get_submodule(name), tensors.get(name)
        if tensor is not None and isinstance(module, nn.Embedding):
            changed.set_submodule(name, _QuantisedLookup(tensor))
        elif tensor is not None:
            module.weight = _dynamic(tensor)
        elif recipe.rule_for(name).weights == "fp16":
            changed.set_submodule(name, _HalfLookup(decoder.get_parameter(f"{name}.weight")))
    return changed


def _dynamic(tensor: QuantTensor) -> nn.Parameter:
    """A weight whose ``F.linear`` rounds its input per token and multiplies in integers."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    scale = tensor.scale.float()
    weight = IntxUnpackedToInt8Tensor(
        qdata=tensor.q,
        scale=scale,
        zero_point=torch.zeros_like(scale, dtype=torch.int8),
        target_dtype={4: torch.int4, 8: torch.int8}[tensor.bits],  # type: ignore[attr-defined]
        block_size=(1, tensor.group_size),
        dtype=torch.float32,
        activation_quantization=ACTIVATIONS,
    )
    return nn.Parameter(weight, requires_grad=False)


class _QuantisedLookup(nn.Module):
    """ids [1,S] -> rows [1,S,D] float32. ``weight`` is the same matrix for a tied output head.

    4 bits: two columns share a byte, and the lookup has the first of them in the high half where
    XNNPACK's product has it in the low half. The table is written XNNPACK's way and the pairs of
    the row that was looked up are swapped, so that both read the same bytes of the file.
    """

    def __init__(self, tensor: QuantTensor) -> None:
        super().__init__()
        self.weight = _dynamic(tensor)
        self.bits, self.width = tensor.bits, tensor.q.shape[1]
        stored = tensor.q
        if tensor.bits == 4:
            halves = (tensor.q + 8).view(torch.uint8)
            stored = halves[:, 1::2] << 4 | halves[:, ::2]
        self.register_buffer("table", stored)
        # XNNPACK has the scales of rows in float32: the head's are shared too. It has those of
        # groups in bfloat16, which the lookup does not read.
        self.register_buffer("scale", tensor.scale.float() if tensor.bits == 8 else tensor.scale)

    def forward(self, ids: Tensor) -> Tensor:
        table, scale, ops = (
            self.get_buffer("table"),
            self.get_buffer("scale"),
            torch.ops.quantized_decomposed,
        )
        kind = torch.float32
        rows: Tensor
        if self.bits == 8:
            rows = ops.embedding_byte.dtype(table, scale, None, -128, 127, ids, dtype=kind)
            return rows
        rows = ops.embedding_4bit.dtype(table, scale, None, -8, 7, ids, dtype=kind)
        pairs = rows.view(-1, self.width // 2, 2)
        swapped = torch.cat([pairs[..., 1:], pairs[..., :1]], -1)
        return swapped.view(rows.shape[0], -1, self.width) if ids.dim() == 2 else swapped.flatten(1)


class _HalfLookup(nn.Module):
    """positions [S] -> rows [S,D] float32, stored as float16."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", weight.half())

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.get_buffer("table")).float()
