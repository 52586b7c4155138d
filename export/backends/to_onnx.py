"""ONNX: one program for prefill and decode, whose cache the caller owns and binds.

Inputs and outputs (names from ``CacheSpec.names()``, S new tokens, T cached, C capacity):

- ``gemm-prefix``: ``input_ids`` [1,S] int64, ``past.<name>.<head>`` [T,D] -> ``logits`` [1,1,V],
  ``present.<name>.<head>`` [S,D], the new rows only. Positions start at T. An int8 cache has
  ``past.<name>.scale.<head>`` [T] float32 and its ``present`` [S] as well.
- ``gqa-aliased``: ``input_ids``, ``total_sequence_length`` [] int32 = T + S, ``past.<name>``
  [1,G,C,D] -> ``logits``, ``present.<name>`` (separate) or ``present.<name>.key`` and ``.value``
  (shared), [1,G,C,D], each to be bound to the memory of its past.
- ``full``: ``input_ids`` -> ``logits``; no cache.
- ``optimum``: see ``onnx_optimum``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgeqkv.cache import CacheSpec
from edgeqkv.errors import MissingDependencyError, UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quiet import quiet
from export.backends import onnx_optimum, onnx_weights
from export.backends.onnx_attention import gemm_prefix, gqa_aliased
from export.lowering import Lowered, Request

ENTRY = "model.onnx"
OPSET = 21
# Tokens of one prefill call. Beyond it only the workspace for scores grows (see the commit).
PREFILL_CHUNK = 128
ATTENTION = {"gemm": "gemm-prefix", "gqa": "gqa-aliased"}
OPTIONS = {"onnx_attention": ("auto", *ATTENTION), "onnx_io": onnx_optimum.IO}
# Query heads per key/value head from which plain products beat the fused operator: they are the
# rows of one product, for which each cached row is read once. Measured, see the commit.
GEMM_FROM_HEADS_PER_GROUP = 4
_TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}


def check(request: Request) -> None:
    """Raises UnsupportedError for weights or options this backend does not know."""
    onnx_weights.check(request.model, request.recipe)
    for name, value in request.options.items():
        if name not in OPTIONS:
            raise UnsupportedError(f"onnx: unknown option {name!r}; allowed: {', '.join(OPTIONS)}")
        if value not in OPTIONS[name]:
            raise UnsupportedError(
                f"onnx: {name} is {value!r}; allowed: {', '.join(OPTIONS[name])}"
            )
    if request.options.get("onnx_io") == "optimum":
        onnx_optimum.check(request)
    if request.cache.dtype == "int8" and request.options.get("onnx_attention") == "gqa":
        raise UnsupportedError(
            "onnx: GroupQueryAttention reads an int8 cache with one scale for all tokens, not one a "
            "token; allowed with --cache-dtype int8: --onnx-attention auto or gemm"
        )


def formulation(request: Request) -> str:
    if request.cache.layout == "none":
        return "full"
    if request.options.get("onnx_io") == "optimum":
        return onnx_optimum.FORMULATION
    chosen = request.options.get("onnx_attention", "auto")
    if chosen == "auto":
        per_group = request.model.num_attention_heads // request.model.num_key_value_heads
        narrow = request.cache.dtype == "int8"  # which the fused operator cannot read
        chosen = "gemm" if narrow or per_group >= GEMM_FROM_HEADS_PER_GROUP else "gqa"
    return ATTENTION[chosen]


class _Gemm(nn.Module):
    def __init__(self, decoder: Decoder, cache: CacheSpec) -> None:
        super().__init__()
        self.decoder, self.cache = decoder, cache

    def forward(self, input_ids: Tensor, pasts: list[Tensor]) -> tuple[Tensor, ...]:
        cache = self.cache
        groups, roles, layers = cache.num_key_value_heads, cache.tensors_per_layer, cache.num_layers
        total = layers * roles * groups  # views; as many scales follow where there are any
        scales: Sequence[Tensor | None] = pasts[total:] or [None] * total
        flat = iter(zip(pasts[:total], scales, strict=True))
        nested = [
            [[next(flat) for _ in range(groups)] for _ in range(roles)] for _ in range(layers)
        ]
        rows: list[Tensor] = []
        row_scales: list[Tensor] = []

        def present(stored: Tensor, scale: Tensor | None) -> None:
            rows.append(stored)
            row_scales.extend([] if scale is None else [scale])

        new = input_ids.shape[1]
        attend = gemm_prefix(self.decoder.spec, nested, new, present)
        positions = torch.arange(new) + pasts[0].shape[0]
        return logits(self.decoder, input_ids, positions, attend), *rows, *row_scales


class _Gqa(nn.Module):
    def __init__(self, decoder: Decoder, cache: CacheSpec) -> None:
        super().__init__()
        self.decoder, self.cache = decoder, cache

    def forward(self, input_ids: Tensor, total: Tensor, pasts: list[Tensor]) -> tuple[Tensor, ...]:
        flat = iter(pasts)
        nested = [[next(flat) for _ in self.cache.roles] for _ in range(self.cache.num_layers)]
        presents: list[Tensor] = []
        attend = gqa_aliased(self.decoder.spec, nested, total, presents.append)
        new = input_ids.shape[1]
        positions = torch.arange(new) + (total.to(torch.int64) - new)
        return logits(self.decoder, input_ids, positions, attend), *presents


class _Full(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        length = input_ids.shape[1]
        attend = self.decoder.eager_attend(length)
        return (logits(self.decoder, input_ids, torch.arange(length), attend),)


def logits(decoder: Decoder, input_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
    """Logits [1,1,V] of the last token."""
    last = decoder.hidden(input_ids, positions, attend)[:, -1]
    return onnx_weights.head(decoder, last).unsqueeze(1)


def lower(decoder: Decoder, request: Request, directory: Path) -> Lowered:
    """Write ``model.onnx`` (and ``model.onnx.data``) into ``directory``."""
    try:
        import onnx
        import onnxscript.optimizer
    except ImportError as e:
        raise MissingDependencyError(
            f"the onnx backend needs {e.name}; pip install 'edgeqkv[onnx]'"
        ) from None
    check(request)
    cache, chosen = request.cache, formulation(request)
    stored = onnx_weights.as_stored(decoder, request)
    module, args, shapes, inputs, outputs = _program(stored, cache, chosen)
    path = directory / ENTRY
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=inputs,
            output_names=outputs,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
        assert program is not None
        onnxscript.optimizer.optimize_ir(program.model, should_fold=onnx_weights.should_fold)
        program.save(path, external_data=True)  # mapped by the runtime; inline it would be copied
        strip(path)
        onnx.checker.check_model(path)
    if chosen == onnx_optimum.FORMULATION:
        onnx_optimum.write_configs(directory, request.model)
    return Lowered(
        entry=ENTRY,
        cache_mode="none" if cache.layout == "none" else "growing",
        formulation=chosen,
        capacities=(cache.capacity,),
        prefill_chunk=min(PREFILL_CHUNK, cache.capacity),
        tools={name: version(name) for name in ("torch", "onnx", "onnxscript")},
        details={"opset": OPSET},
    )


def strip(path: Path) -> None:
    """Drop what the exporter notes for debugging: stack traces with this machine's paths, shapes of
    every intermediate value. It is most of the file of a small model, and runtimes read none of it.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    del graph.value_info[:]
    for item in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del item.metadata_props[:]
        item.ClearField("doc_string")
    onnx.save(model, path)


def _program(
    decoder: Decoder, cache: CacheSpec, chosen: str
) -> tuple[nn.Module, tuple[Any, ...], Any, list[str], list[str]]:
    """(module, example arguments, dynamic shapes, input names, output names)."""
    if chosen == onnx_optimum.FORMULATION:
        return onnx_optimum.program(decoder, cache)
    # One symbol for all views: fewer guards to prove, and the names of the file's dynamic axes.
    new_axis, past_axis, capacity_axis = (torch.export.Dim(n, min=0) for n in ("S", "T", "C"))
    new, past, dim, groups = 3, 5, cache.head_dim, cache.num_key_value_heads
    ids = torch.zeros(1, new, dtype=torch.int64)
    dtype = _TORCH_DTYPES[cache.dtype]
    if chosen == "full":
        return _Full(decoder), (ids,), ({1: new_axis},), ["input_ids"], ["logits"]
    if chosen == "gemm-prefix":
        tensors = [*cache.names(), *cache.scale_names()]
        names = [f"{name}.{g}" for name in tensors for g in range(groups)]
        total = len(cache.names()) * groups
        views = [torch.zeros(past, dim, dtype=dtype) for _ in names[:total]]
        views += [torch.zeros(past) for _ in names[total:]]
        return (
            _Gemm(decoder, cache),
            (ids, views),
            ({1: new_axis}, [{0: past_axis} for _ in names]),
            ["input_ids", *(f"past.{n}" for n in names)],
            ["logits", *(f"present.{n}" for n in names)],
        )
    names = cache.names()
    buffers = [torch.zeros(1, groups, past + new, dim, dtype=dtype) for _ in names]
    out = (
        [f"{n}.{role}" for n in names for role in ("key", "value")]
        if cache.layout == "shared"
        else names
    )
    return (
        _Gqa(decoder, cache),
        (ids, torch.tensor(past + new, dtype=torch.int32), buffers),
        ({1: new_axis}, None, [{2: capacity_axis} for _ in names]),
        ["input_ids", "total_sequence_length", *(f"past.{n}" for n in names)],
        ["logits", *(f"present.{n}" for n in out)],
    )
