"""What is changed in ExecuTorch's SDK keeps its meaning."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("executorch.exir")

from edgeqkv.quiet import quiet
from export.backends.executorch_sdk import prepare


def test_shapes_of_torchaos_operators_are_those_that_they_compute() -> None:
    with quiet():
        import torchao.quantization.quant_primitives  # noqa: F401  registers the operators

        prepare()
    ops, x = torch.ops.torchao, torch.randn(2, 3, 64)
    blocks: list[tuple[int, ...]] = [(1, 1, 64), (1, 1, 32), (1, 3, 64), (2, 1, 16)]
    results = []
    for fake in (False, True):
        mode = torch._subclasses.FakeTensorMode()
        given = mode.from_tensor(x) if fake else x
        for block in blocks:
            for kind in ("ASYMMETRIC", "SYMMETRIC"):
                for keepdim in (False, True):
                    scale, zero = ops.choose_qparams_affine(
                        given, kind, block, torch.int8, keepdim=keepdim
                    )
                    results.append((scale, zero))
            zero = zero.to(torch.int32)
            q = ops.quantize_affine(given, block, scale, zero, torch.int8)
            back = ops.dequantize_affine(q, block, scale, zero, torch.int8)
            results.append((q, back))
    half = len(results) // 2
    for real, shape_alone in zip(results[:half], results[half:], strict=True):
        for a, b in zip(real, shape_alone, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
