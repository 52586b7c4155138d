"""How a recipe's weights are stored in an ONNX file, and the operators that read them.

int8 and int4: com.microsoft ``MatMulNBits`` and ``GatherBlockQuantized``, whose layouts of the packed
integers agree, so that a tied embedding and head are one initializer. fp16: a Cast to float32, which
the runtime does once, at load, into private memory: fp16 halves the file and not the process.

N output rows, K input columns, B columns a block: packed [N, K/B, B * bits / 8] uint8, scale [N, groups]
float16, one group being one or several blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgeqkv.errors import UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quant import GROUPED, QuantRecipe, matrices
from edgeqkv.spec import ModelSpec
from export.lowering import Request
from export.quantise import QuantTensor

ACCURACY_LEVEL = 4  # activations are rounded to int8, a scale per block, and multiplied as integers
LEAST_BLOCK = 16  # of both operators
# Wider groups are cut into blocks of this size with equal scales. Measured, see the commit.
MOST_BLOCK = 128
FLOAT16_MAX = 65504.0


def block_size(group_size: int) -> int:
    """Columns of a block of the operators: the largest power of two that divides the group, at most MOST_BLOCK."""
    return min(group_size & -group_size, MOST_BLOCK)


def check(spec: ModelSpec, recipe: QuantRecipe) -> None:
    """Raises UnsupportedError for a matrix that cannot be cut into the operators' blocks."""
    shapes = spec.parameter_shapes()
    for module in matrices(spec):
        rule, width = recipe.rule_for(module), shapes[f"{module}.weight"][1]
        if rule.weights in GROUPED and block_size(rule.columns(width)) < LEAST_BLOCK:
            raise UnsupportedError(
                f"onnx: {module} has {width} input columns; {rule.weights} needs a multiple of "
                f"{LEAST_BLOCK}; give it fp16 or fp32 in a --recipe"
            )


def pack(q: Tensor, bits: int, block: int) -> Tensor:
    """q [N, K] int8 -> [N, K/block, block * bits / 8] uint8: offset by 2^(bits-1), low half first."""
    unsigned = q.view(torch.uint8) ^ 0x80  # q + 128
    if bits == 4:
        pairs = (unsigned - 120).view(q.shape[0], -1, 2)  # q + 8
        unsigned = pairs[..., 0] | (pairs[..., 1] << 4)
    return unsigned.view(q.shape[0], q.shape[1] // block, -1)


class NBits(nn.Module):
    """A matrix of integers, read as a linear layer (:meth:`linear`) and as an embedding."""

    packed: Tensor
    scale: Tensor

    def __init__(self, tensor: QuantTensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.rows, self.columns = tensor.q.shape
        self.bits, self.block = tensor.bits, block_size(tensor.group_size)
        self.repeats = tensor.group_size // self.block
        self.register_buffer("packed", pack(tensor.q, self.bits, self.block))
        self.register_buffer("scale", tensor.scale)
        self.bias = bias
        # 4 significant bits of q times 8 of a scale are exact in float16, unless beyond its range.
        largest = float(tensor.scale.max()) * 2 ** (self.bits - 1)
        self.exact_in_half = self.bits == 4 and largest < FLOAT16_MAX

    def block_scales(self, dtype: torch.dtype) -> Tensor:
        """[N, K/block]."""
        scale = self.scale.to(dtype)
        if self.repeats == 1:
            return scale
        return scale[..., None].expand(*scale.shape, self.repeats).flatten(1)

    def linear(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N], in float32."""
        out: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            (x, self.packed, self.block_scales(torch.float32), None, None, self.bias),
            attrs={
                "K": self.columns,
                "N": self.rows,
                "bits": self.bits,
                "block_size": self.block,
                "accuracy_level": ACCURACY_LEVEL,
            },
            dtype=torch.float32,
            shape=(*x.shape[:-1], self.rows),
            version=1,
        )
        return out

    def embedding(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> rows [..., K] float32."""
        dtype = torch.float16 if self.exact_in_half else torch.float32
        blocks = self.columns // self.block
        out = torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            (self.packed, ids, self.block_scales(dtype).unsqueeze(-1)),
            attrs={
                "bits": self.bits,
                "block_size": self.block,
                "gather_axis": 0,
                "quantize_axis": 2,
            },
            dtype=dtype,
            shape=(*ids.shape, blocks, self.block),
            version=1,
        )
        return out.flatten(-2).to(torch.float32)


class Half(nn.Module):
    """A matrix in float16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.half(), requires_grad=False)
        self.bias = bias

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float(), self.bias)

    def embedding(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).float()


class Linear(nn.Module):
    """What takes the place of nn.Linear in the decoder."""

    def __init__(self, stored: NBits | Half) -> None:
        super().__init__()
        self.stored = stored

    def forward(self, x: Tensor) -> Tensor:
        return self.stored.linear(x)


class Embedding(nn.Module):
    """What takes the place of nn.Embedding in the decoder."""

    def __init__(self, stored: NBits | Half) -> None:
        super().__init__()
        self.stored = stored

    def forward(self, ids: Tensor) -> Tensor:
        return self.stored.embedding(ids)


def as_stored(decoder: Decoder, request: Request) -> Decoder:
    """A decoder to be traced: float32 weights shared with ``decoder``, the others in stored form."""
    if not request.recipe.rules:
        return decoder
    with torch.device("meta"):
        traced = Decoder(decoder.spec)
    traced.load_state_dict(decoder.state_dict(), assign=True)
    for module in matrices(decoder.spec):
        original = decoder.get_submodule(module)
        bias = getattr(original, "bias", None)
        stored: NBits | Half
        if module in request.tensors:
            stored = NBits(request.tensors[module], bias)
        elif request.recipe.rule_for(module).weights == "fp16":
            stored = Half(decoder.get_parameter(f"{module}.weight"), bias)
        else:
            continue
        kind = Embedding if isinstance(original, nn.Embedding) else Linear
        traced.set_submodule(module, kind(stored))
    return traced.eval().requires_grad_(False)


def head(decoder: Decoder, states: Tensor) -> Tensor:
    """states [M, hidden_size] -> logits [M, vocab_size], from the one tensor that a tied embedding reads too.

    Float weights through one Gemm that shares its initializer with the embedding's Gather: the
    exporter would transpose the weight, and the runtime would fold that into a second copy.
    """
    module = decoder.get_submodule("wte" if decoder.spec.tie_word_embeddings else "lm_head")
    stored = module.stored if isinstance(module, (Linear, Embedding)) else None
    if isinstance(stored, NBits):
        return stored.linear(states)
    weight = decoder.head_weight if stored is None else stored.weight.float()
    out: Tensor = torch.onnx.ops.symbolic(
        "Gemm",
        (states, weight),
        attrs={"transB": 1},
        dtype=torch.float32,
        shape=(states.shape[0], weight.shape[0]),
    )
    return out


def should_fold(node: Any) -> bool | None:
    """False, for onnxscript's optimizer, where a stored float16 would become float32 in the file."""
    kinds = {v.dtype.name for v in node.inputs if v is not None and v.dtype is not None}
    return False if "FLOAT16" in kinds else None
