"""What is changed in the SDK, for the time and the memory of an export; the program is the same, byte for byte.

All of it holds for the process. Names are those of the pinned versions.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@functools.cache
def prepare() -> None:
    """Call before the first program is traced, with torchao and executorch importable."""
    _only_useful_passes()
    _shapes_alone()
    _weights_are_not_copied()


def _only_useful_passes() -> None:
    """Leave out XNNPACK's passes for what no decoder has: each walks every partition of each method.

    Nine are for images, convolutions, batch norms and static quantisation, or look for the
    attention of a fused operator.
    """
    from executorch.backends.xnnpack import _passes, xnnpack_preprocess

    skipped = {
        "ConvertToUpsampleBilinear2d",
        "ConvertToSDPAPass",
        "FuseBatchNormPass",
        "DecomposeBatchNorm",
        "DecomposeConcatenate",
        "InsertPadQDQPass",
        "Conv1dUnsqueezePass",
        "PReLUReshapePass",
        "ChannelsLastTaggedReshapePass",
    }

    def manager(program: Any, passes: Any = None) -> Any:
        made = _passes.XNNPACKPassManager(program, passes)
        made.passes = [one for one in made.passes if one.__name__ not in skipped]
        return made

    xnnpack_preprocess.XNNPACKPassManager = manager


def _weights_are_not_copied() -> None:
    """XNNPACK changes the graph of a partition, which it gets a copy of, and not its weights."""
    from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend

    def copied(program: Any, compile_specs: Any) -> Any:
        tensors = (*program.state_dict.values(), *program.constants.values())
        return copy.deepcopy(program, {id(tensor): tensor for tensor in tensors})

    XnnpackBackend.copy_exported_program_for_preprocess = staticmethod(copied)


def _shapes_alone() -> None:
    """Tell fake tensors what shapes torchao's operators give.

    They are composite, so each of the passes that run the graph on fake tensors would compute them
    by a dozen operators: half the time of an export.
    """
    from torch._decomp import meta_table
    from torch._library.simple_registry import singleton
    from torch._library.utils import Kernel
    from torchao.quantization.quant_primitives import _get_reduction_params

    def choose_qparams_affine(
        input: Tensor,
        mapping_type: str,
        block_size: Sequence[int],
        target_dtype: torch.dtype,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float | None = None,
        scale_dtype: torch.dtype | None = None,
        zero_point_dtype: torch.dtype | None = None,
        keepdim: bool = False,
    ) -> tuple[Tensor, Tensor]:
        sizes, reduced = _get_reduction_params(block_size, input.shape)
        shape = [size for i, size in enumerate(sizes) if i not in reduced]
        if keepdim:
            shape = [size // block for size, block in zip(input.shape, block_size, strict=True)]
        whole = torch.int32 if mapping_type == "ASYMMETRIC" else input.dtype
        scale = input.new_empty(shape, dtype=scale_dtype or input.dtype)
        return scale, input.new_empty(shape, dtype=zero_point_dtype or whole)

    def quantize_affine(
        input: Tensor,
        block_size: Sequence[int],
        scale: Tensor,
        zero_point: Tensor | None,
        output_dtype: torch.dtype,
        quant_min: int | None = None,
        quant_max: int | None = None,
    ) -> Tensor:
        return input.new_empty(input.shape, dtype=output_dtype)

    def dequantize_affine(
        input: Tensor,
        block_size: Sequence[int],
        scale: Tensor,
        zero_point: Tensor | None,
        input_dtype: torch.dtype,
        quant_min: int | None = None,
        quant_max: int | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        return input.new_empty(input.shape, dtype=output_dtype)

    for rule in (choose_qparams_affine, quantize_affine, dequantize_affine):
        operator = getattr(torch.ops.torchao, rule.__name__).default
        meta_table[operator] = rule  # else it is decomposed before the registry is asked
        # register_fake refuses composite operators.
        singleton.find(operator.name()).fake_impl.kernels.append(Kernel(rule, __name__))
