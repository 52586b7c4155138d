"""Hazards of stateful programs that people met on real devices, found in the graph. No Mac needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from export.backends.coreml_graph import VIEWS, Graph, Op, dtype_name

NEURAL_ENGINE_MULTIPLE = 32
INT16_MAX = 2**15 - 1


def lint(graph: Graph) -> Iterator[str]:
    """One line per hazard, with the report it comes from."""
    if not graph.states:
        return
    if names := _transposed_writes(graph):
        yield (
            f"{_and_more(names)}: a transpose between the projection and the state update; such "
            "programs fail to load for more than one token (coremltools#2278, #2275)"
        )
    if names := [n for n, (_, shape) in graph.states.items() if shape[-1] % NEURAL_ENGINE_MULTIPLE]:
        last = graph.states[names[0]][1][-1]
        yield (
            f"{_and_more(names)}: last dimension {last} is not a multiple of "
            f"{NEURAL_ENGINE_MULTIPLE}; fails on the Neural Engine, use CPU_AND_GPU "
            "(coremltools#2631)"
        )
    if names := [n for n, (_, shape) in graph.states.items() if max(shape) > INT16_MAX]:
        yield (
            f"{_and_more(names)}: a dimension of {max(graph.states[names[0]][1])}; Core ML keeps "
            "shapes and indices in 16-bit integers near 32768 and 65536"
        )
    if names := _narrow_indices(graph):
        yield (
            f"{_and_more(names)}: 16-bit indices into a table of more than {INT16_MAX} rows "
            "(coremltools#2626)"
        )
    if names := _four_bit(graph):
        yield (
            f"{_and_more(names)}: 4-bit palettised weights in a stateful program; crashed on the "
            "Neural Engine after 100 to 200 predictions (coremltools#2716)"
        )
    if names := _mixed_inputs(graph):
        yield (
            f"{_and_more(names)}: an input of fixed shape beside one with a range; a stateful "
            "program with both aborts (coremltools#2548)"
        )
    if names := _transposed_reads(graph):
        yield (
            f"{_and_more(names)}: transposed on every read to split the key/value heads; the "
            "runtime may copy it for that (one key/value head needs no transpose)"
        )


def _and_more(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _transposed_writes(graph: Graph) -> list[str]:
    """States whose new rows pass a transpose; what is read from a state is not a new row."""
    found = []
    for op in graph.of("slice_update"):
        states = {m.one("input") for m in _makers(graph, op.one("x")) if m.type == "read_state"}
        if any(m.type == "transpose" for m in _makers(graph, op.one("update"))):
            found += sorted(states)
    return found


def _makers(graph: Graph, name: str) -> list[Op]:
    return list(graph.upstream(name, VIEWS))


def _transposed_reads(graph: Graph) -> list[str]:
    found = []
    for read in graph.of("read_state"):
        reached = graph.downstream(read.outputs[0], frozenset({"reshape", "cast", "expand_dims"}))
        if any(op.type == "transpose" for op, _ in reached):
            found.append(read.one("input"))
    return list(dict.fromkeys(found))


def _narrow_indices(graph: Graph) -> list[str]:
    found = []
    for op in graph.of("gather", "gather_along_axis"):
        rows = max(graph.shapes.get(op.one("x"), (0,)) or (0,))
        narrow = graph.dtypes.get(op.one("indices")) in ("INT16", "UINT16")
        if narrow and rows > INT16_MAX:
            found.append(op.outputs[0])
    return found


def _four_bit(graph: Graph) -> list[str]:
    """Look-up tables with 4-bit indices, bound by name or as literals."""
    found = []
    for op in graph.of("constexpr_lut_to_dense"):
        argument = op.proto.inputs["indices"].arguments[0]
        literal = dtype_name(argument.value.type)
        if "UINT4" in (graph.dtypes.get(argument.name), literal):
            found.append(op.outputs[0])
    return found


def _mixed_inputs(graph: Graph) -> list[str]:
    kinds = {
        i.name: i.type.multiArrayType.WhichOneof("ShapeFlexibility")
        for i in graph.description.input
    }
    ranging = any(kinds.values())
    return [name for name, kind in kinds.items() if ranging and not kind]
