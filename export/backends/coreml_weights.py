"""Integer weights as Core ML's ``constexpr_blockwise_shift_scale``, from the integers we have.

``coremltools.optimize`` would round the float weights again and lose what calibration chose. So the
traced program holds the integers, behind an operator of our own that coremltools is told to write
as that constexpr: weight.bin gets them packed, with their float16 scales, and no offset.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgeqkv.model import Decoder
from export.lowering import shared_copy
from export.quantise import QuantTensor

_OPERATOR = torch.library.Library("edgeqkv", "DEF")  # type: ignore[no-untyped-call]
_OPERATOR.define("dequantise(Tensor q, Tensor scale, int bits) -> Tensor")  # type: ignore[no-untyped-call]


def _shape_alone(q: Tensor, scale: Tensor, bits: int) -> Tensor:
    """q [out,in] int8, scale [out, in / group_size] -> zeros [out,in] float32 that take no memory.

    A trace keeps every tensor that it saw alive, and of this one it needs no more than the shape.
    """
    return scale.new_zeros(1, dtype=torch.float32).expand(q.shape)


_OPERATOR.impl("dequantise", _shape_alone, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class _Quantised(nn.Module):
    """A Linear, or with ``table`` an Embedding, to be traced: integers stand where ``weight`` was."""

    def __init__(self, tensor: QuantTensor, bias: Tensor | None, *, table: bool) -> None:
        super().__init__()
        self.register_buffer("q", tensor.q)
        self.register_buffer("scale", tensor.scale)
        self.bits, self.bias, self.table = tensor.bits, bias, table
        self.made: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Once in a trace, though a tied matrix is read twice: coremltools would find out that two
        are equal by comparing them in float64, 1.3 GB for a model of 300 M parameters."""
        if self.made is not None:
            return self.made
        made: Tensor = torch.ops.edgeqkv.dequantise(
            self.get_buffer("q"), self.get_buffer("scale"), self.bits
        )
        # Not before: torch looks at every attribute as it prepares a trace.
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            self.made = made
        return made

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight) if self.table else F.linear(x, self.weight, self.bias)


def with_integers(decoder: Decoder, tensors: Mapping[str, QuantTensor]) -> Decoder:
    """The decoder with the modules of ``tensors`` replaced, for tracing and not for running; every
    other tensor is shared with it."""
    changed = shared_copy(decoder)
    for name, tensor in tensors.items():
        module = changed.get_submodule(name)
        table = isinstance(module, nn.Embedding)
        quantised = _Quantised(tensor, getattr(module, "bias", None), table=table)
        changed.set_submodule(name, quantised)
    return changed


@functools.cache
def register() -> None:
    """Tell coremltools' torch frontend what the operator means."""
    from coremltools.converters.mil import Builder, register_torch_op
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs
    from coremltools.converters.mil.mil import types

    @register_torch_op(torch_alias=["edgeqkv::dequantise"])  # type: ignore[untyped-decorator]
    def edgeqkv_dequantise(context: Any, node: Any) -> None:
        q, scale, bits = _get_inputs(context, node, expected=3)
        kind = {4: types.int4, 8: types.int8}[int(bits.val)]
        weight = Builder.constexpr_blockwise_shift_scale(
            data=q.val.astype(types.nptype_from_builtin(kind)),
            scale=scale.val.astype("float32"),  # as the rest of the program before it is narrowed
            name=node.name,
        )
        context.add(weight)
