"""ExecuTorch: one .pte with a method per capacity, XNNPACK delegate, cache updated in place.

A method ``forward_<capacity>`` takes ``input_ids`` [1,S] int64 and ``input_pos`` [S] int64 (S from 1
to the prefill chunk: prefill and decode are the same program) and gives ``logits`` [1,1,V] float32
of the last token. Its cache is mutable buffers, planned into an arena of their own. All methods
share one copy of the weights in the file, a tied embedding and head too; a runner loads the smallest that holds its context,
because a static cache is paid in full at load and read in full on each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from edgeqkv.cache import CacheSpec
from edgeqkv.errors import MissingDependencyError, UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quiet import quiet
from export.backends.executorch_program import Custom, Full, Plain
from export.backends.executorch_sdk import prepare
from export.backends.executorch_share import share
from export.backends.executorch_weights import ACTIVATIONS, check_recipe, with_stored_weights
from export.lowering import Lowered, Request

ENTRY = "model.pte"
LEAST_CHUNK, MOST_CHUNK = 16, 128
LEAST_CAPACITY = 32
ATTENTION = {"plain": "plain-bmm", "custom": "custom-sdpa"}
# An fp16 buffer has to be widened before XNNPACK can multiply it, by a portable kernel and into a
# float32 copy of the layer's cache: 445 us for [1,2048,64], against 180 us for all of attention.
CACHE_DTYPES = ("fp32",)
# Decode time plain / custom by R = query heads per key/value head, mean of depths C/2 and C (the
# smallest method that holds a context runs in that range); 16 heads x 64, C = 1024, one thread.
PLAIN_OVER_CUSTOM = {1: 2.06, 2: 1.15, 4: 0.63, 8: 0.60, 16: 0.34}
CUSTOM_WINS_ABOVE = 1.2  # plain loads in every runner, so custom has to be worth it
CACHE_ARENA = 2  # index into non_const_buffer_sizes: 0 is unused, 1 is activations


def check(request: Request) -> None:
    """Raises UnsupportedError for weights, a cache dtype or options this backend does not know."""
    check_recipe(request.model, request.recipe)
    for name, value in request.options.items():
        if name != "et_attention":
            raise UnsupportedError(f"executorch: unknown option {name!r}; allowed: et_attention")
        if value not in ("auto", *ATTENTION):
            raise UnsupportedError(
                f"executorch: et_attention is {value!r}; allowed: auto, {', '.join(ATTENTION)}"
            )
    if request.cache.names() and request.cache.dtype not in CACHE_DTYPES:
        raise UnsupportedError(
            f"executorch: cache dtype {request.cache.dtype} is not supported; "
            f"allowed: {', '.join(CACHE_DTYPES)}"
        )


def formulation(request: Request) -> str:
    """How attention reads the cache: what was asked for, else what measured faster."""
    if request.cache.layout == "none":
        return "full"
    chosen = request.options.get("et_attention", "auto")
    if chosen == "auto":
        model = request.model
        repeats = model.num_attention_heads // model.num_key_value_heads
        measured = PLAIN_OVER_CUSTOM[max(r for r in PLAIN_OVER_CUSTOM if r <= repeats)]
        chosen = "custom" if measured > CUSTOM_WINS_ABOVE else "plain"
    return ATTENTION[chosen]


def prefill_chunk(request: Request, chosen: str) -> int:
    """Most tokens of one call: so many that their scores in a layer take what the whole cache takes.

    XNNPACK holds two copies of the scores [H,S,C] from load on, as large as the largest S makes them.
    """
    cache = request.cache
    if chosen == "full":
        return cache.capacity
    fitting = MOST_CHUNK  # custom_sdpa keeps no scores
    if chosen == ATTENTION["plain"]:
        fitting = cache.bytes_per_token // (request.model.num_attention_heads * 4)
    return min(cache.capacity, MOST_CHUNK, max(LEAST_CHUNK, fitting))


def capacities(cache: CacheSpec) -> tuple[int, ...]:
    """Contexts that get a method of their own: a quarter, half and all of the cache's capacity."""
    full = cache.capacity
    if cache.layout == "none":
        return (full,)
    return tuple(sorted({c for c in (full // 4, full // 2) if c >= LEAST_CAPACITY} | {full}))


def lower(decoder: Decoder, request: Request, directory: Path) -> Lowered:
    """Write ``model.pte`` into ``directory``.

    Raises:
        MissingDependencyError: no executorch. UnsupportedError: see :func:`check`.
    """
    check(request)
    cache, chosen, sizes = request.cache, formulation(request), capacities(request.cache)
    chunk = prefill_chunk(request, chosen)
    with quiet(), torch.no_grad():
        try:
            import executorch.exir
        except ImportError as e:
            raise MissingDependencyError(
                f"the executorch backend needs {e.name}; pip install 'edgeqkv[executorch]'"
            ) from None
        if chosen == "custom-sdpa":
            import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  registers llama::
        prepare()
        stored = with_stored_weights(decoder, request.recipe, request.tensors)
        programs = {
            f"forward_{size}": _export(stored, cache, chosen, size, chunk) for size in sizes
        }
        manager = _to_executorch(programs)
        with (directory / ENTRY).open("wb") as f:
            manager.write_to_file(f)
        saved = share(directory / ENTRY)
    plans = {plan.name: plan for plan in manager.executorch_program.execution_plan}
    planned = {size: list(plans[f"forward_{size}"].non_const_buffer_sizes) for size in sizes}
    return Lowered(
        entry=ENTRY,
        cache_mode="none" if chosen == "full" else "static",
        formulation=chosen,
        capacities=sizes,
        prefill_chunk=chunk,
        tools={name: version(name) for name in ("torch", "executorch", "torchao")},
        details={
            "activations": ACTIVATIONS if request.tensors else "fp32",
            "shared_constant_bytes": saved,
            "planned_bytes": {str(size): arenas for size, arenas in planned.items()},
            "cache_arena_bytes": {
                str(size): arenas[CACHE_ARENA] if len(arenas) > CACHE_ARENA else 0
                for size, arenas in planned.items()
            },
        },
    )


def _export(
    decoder: Decoder, cache: CacheSpec, chosen: str, capacity: int, chunk: int
) -> torch.export.ExportedProgram:
    new = min(3, capacity)
    ids = torch.zeros(1, new, dtype=torch.int64)
    if chosen == "full":
        length = torch.export.Dim("length", min=1, max=capacity)
        return torch.export.export(Full(decoder, capacity), (ids,), dynamic_shapes=({1: length},))
    module: nn.Module = (Plain if chosen == "plain-bmm" else Custom)(decoder, cache, capacity)
    length = torch.export.Dim("length", min=1, max=min(chunk, capacity))
    return torch.export.export(
        module.eval(),
        (ids, torch.arange(new)),
        dynamic_shapes=({1: length}, {0: length}),
    )


def _to_executorch(programs: dict[str, torch.export.ExportedProgram]) -> Any:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import (
        EdgeCompileConfig,
        ExecutorchBackendConfig,
        to_edge_transform_and_lower,
    )
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass

    partitioner = XnnpackPartitioner()
    keep = partitioner.ops_to_not_decompose
    # Of the operators it keeps whole we have only linear, always with a constant weight: asking it
    # about each node costs two more decompositions. With the check of the SDK's own dialect that
    # is a third of the time of an export (8.4 against 5.6 s for one layer); the bytes are the same.
    partitioner.ops_to_not_decompose = lambda program: (keep(program)[0], None)
    edge = to_edge_transform_and_lower(
        programs,
        partitioner=[partitioner],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    return edge.to_executorch(
        ExecutorchBackendConfig(
            run_reinplace_pass=True,
            emit_mutable_buffer_names=True,
            sym_shape_eval_pass=ConstraintBasedSymShapeEvalPass(),
            # "shared" buffers get an arena of their own; one pass per method, because methods of
            # different capacities have buffers of different sizes under the same names.
            memory_planning_pass={
                name: MemoryPlanningPass(_plan_what_is_made, share_mutable_buffers=True)
                for name in programs
            },
        )
    )


def _plan_what_is_made(
    alignment: int, specs: Iterable[Any], graph: torch.fx.GraphModule, signature: Any, padding: int
) -> list[int]:
    """The SDK's plan of the activations' arena, without a second cache in it.

    The node that returns a cache updated in place still carries the tensor that this would have
    been out of place, and the SDK plans it: as many bytes as the cache, which nothing ever writes.
    """
    from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite

    end = graph.graph.output_node()
    returned = cast("tuple[torch.fx.Node, ...]", end.args[0])
    stale, end.meta["spec"] = end.meta["spec"], [node.meta["spec"] for node in returned]
    phantoms = set(stale) - set(end.meta["spec"])
    kept = [spec for spec in specs if spec not in phantoms]
    sizes: list[int] = MemoryPlanningAlgorithmSuite()(alignment, kept, graph, signature, padding)
    return sizes
