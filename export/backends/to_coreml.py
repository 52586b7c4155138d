"""Core ML: one stateful mlprogram for prefill and decode, converted anywhere, run on iOS 18 / macOS 15.

The program takes ``input_ids [1, S]`` and ``positions [S]`` (int32, S from 1 to ``prefill_chunk``)
and gives ``logits [1, 1, vocab_size]`` float32 of the last token. Each cache tensor is a float16
state ``[1, capacity, num_key_value_heads * head_dim]``; ``shared`` has one per layer, read as key
and as value.

S is a range, default 1, for both inputs. Of the three ways Core ML offers:

- a range runs on the Neural Engine for its default shape only, the others go to GPU or CPU
  (an Apple engineer, developer.apple.com/forums/thread/724930): decode keeps it, prefill does not
  need it;
- enumerated shapes could keep both, but programs with them fail at prediction (coremltools#2730)
  and LayerNorm kept them off the Neural Engine anyway (#1909);
- a fixed input beside a ranging one makes a stateful program abort (#2548), hence ``positions``
  has S elements although its first would do.

States cannot have flexible shapes (#2537), so a bundle has exactly one capacity, and memory for
it is paid when the state is made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeqkv.errors import MissingDependencyError, UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quant import SCHEMES
from edgeqkv.quiet import quiet
from export.backends.coreml_program import StatefulDecoder, StatelessDecoder, state_names
from export.backends.coreml_weights import register, with_integers
from export.lowering import Lowered, Request
from export.quantise import QuantTensor

ENTRY = "model.mlpackage"
PREFILL_CHUNK = 64
PRECISIONS = ("fp16", "fp32")
FLOAT16_MAX = 65504.0


def precision(request: Request) -> str:
    """What the program computes in: ``coreml_precision``, default fp16 (phones run nothing else fast)."""
    return request.options.get("coreml_precision", "fp16")


def check(request: Request) -> None:
    """Refuse what Core ML cannot hold, before any work.

    Raises:
        UnsupportedError: a cache that is not float16, an unknown precision, rounded weights with
            float32 compute.
        MissingDependencyError: coremltools is not installed.
    """
    if request.cache.layout != "none" and request.cache.dtype != "fp16":
        raise UnsupportedError(
            f"coreml: cache dtype is {request.cache.dtype}; Core ML states are float16 only, "
            "allowed: fp16 (give --cache-dtype fp16)"
        )
    if precision(request) not in PRECISIONS:
        raise UnsupportedError(
            f"coreml: coreml_precision is {precision(request)!r}; allowed: {', '.join(PRECISIONS)}"
        )
    # Floating weights are stored in what the program computes in; fp32 asks for no rounding first.
    allowed = tuple(SCHEMES) if precision(request) == "fp16" else ("fp32",)
    if request.recipe.schemes - set(allowed):
        raise UnsupportedError(
            f"coreml: weights {request.weights} are not supported with {precision(request)} compute; "
            f"allowed: {', '.join(allowed)}"
        )
    if importlib.util.find_spec("coremltools") is None:
        raise MissingDependencyError(
            "coreml: coremltools is not installed; pip install 'edgeqkv[coreml]'"
        )


def lower(decoder: Decoder, request: Request, directory: Path) -> Lowered:
    """Write ``model.mlpackage`` into ``directory``.

    Raises:
        UnsupportedError: what :func:`check` refuses, or a weight beyond float16's range.
    """
    check(request)
    with quiet():
        import coremltools as ct
        import torch

    cache, compute = request.cache, precision(request)
    stateful = cache.layout != "none"
    if compute == "fp16":
        _check_range(decoder, request.tensors)
    chunk = min(PREFILL_CHUNK, cache.capacity) if stateful else cache.capacity
    decoder = with_integers(decoder, request.tensors)
    with quiet(), torch.no_grad():
        register()
        program = (
            StatefulDecoder(decoder, cache)
            if stateful
            else StatelessDecoder(decoder, cache.capacity)
        ).eval()
        length = min(3, chunk)
        example = torch.zeros(1, length, dtype=torch.int32), torch.arange(length).int()
        traced = torch.jit.trace(program, example, check_trace=False)  # type: ignore[no-untyped-call]
        package = _convert(ct, traced, request, chunk)
        package.save(str(directory / ENTRY))
    weights = directory / ENTRY / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"
    return Lowered(
        entry=ENTRY,
        cache_mode="static" if stateful else "none",
        formulation="grouped-matmul-over-capacity" if stateful else "full",
        capacities=(cache.capacity,),
        prefill_chunk=chunk,
        tools={"coremltools": ct.__version__, "torch": torch.__version__},
        details={
            "compute_precision": compute,
            "stored_weights": request.weights if request.tensors else compute,
            "minimum_deployment_target": "iOS18, macOS15",
            "weight_file_bytes": weights.stat().st_size,
        },
    )


def _convert(ct: Any, traced: Any, request: Request, chunk: int) -> Any:
    import numpy as np

    cache = request.cache
    stateful = cache.layout != "none"
    default = 1 if stateful else chunk
    length = ct.RangeDim(1, chunk, default=default) if chunk > 1 else 1
    shape = (1, cache.capacity, cache.num_key_value_heads * cache.head_dim)
    state = ct.TensorType(shape=shape, dtype=np.float16)
    return ct.convert(
        traced,
        convert_to="mlprogram",
        inputs=[
            ct.TensorType("input_ids", shape=(1, length), dtype=np.int32),
            ct.TensorType("positions", shape=(length,), dtype=np.int32),
        ],
        outputs=[ct.TensorType("logits", dtype=np.float32)],
        states=[ct.StateType(state, name=name) for name in state_names(cache)] or None,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT16
        if precision(request) == "fp16"
        # Not FLOAT32: it would cast the whole state to float32 and back around each update.
        else ct.transform.FP16ComputePrecision(lambda op: op.op_type == "slice_update"),
        skip_model_load=True,
    )


def _check_range(decoder: Decoder, tensors: Mapping[str, QuantTensor]) -> None:
    for name, weight in decoder.state_dict().items():
        integers = tensors.get(name.removesuffix(".weight"))
        largest = float(weight.abs().max()) if integers is None else integers.largest()
        if largest > FLOAT16_MAX:
            raise UnsupportedError(
                f"coreml: {name} holds {largest:.3g}, beyond float16's {FLOAT16_MAX:.0f}; "
                "export with coreml_precision fp32"
            )
