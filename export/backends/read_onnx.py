"""What an ONNX file really holds: which inputs attention reads as cache, and what copies them.

Nothing here believes a name or the manifest. A graph input is followed through whatever moves data
to the product that reads it: one whose result reaches a Softmax reads keys, one that weighs it
with the result of a Softmax reads values. What multiplies the scores or the result of a Softmax, row
by row, is the scale of keys or of values.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from edgeqkv.artifact import Artifact, inside
from export.backends.onnx_duplicates import duplicate_bytes
from export.backends.onnx_graph import Graph
from export.facts import ArtifactFacts, CacheTensor

PRODUCTS = {"MatMul", "FusedMatMul", "Gemm", "Einsum"}
# Operators that are attention as a whole: which input is which, and whether the new rows can go
# straight into the memory of the past. (past key, past value, key, value, present outputs or ())
FUSED = {
    "GroupQueryAttention": (3, 4, 1, 2, (1, 2)),
    "MultiHeadAttention": (6, 7, 1, 2, ()),
    "Attention": (4, 5, 1, 2, ()),
}
METADATA = {"Shape", "Size"}  # read no data
ALIASES = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
# What may lie between a product of scores and its Softmax, and between a Softmax and its product.
MOVES = ALIASES | {"Cast", "Transpose", "Split", "Slice", "Gather", "Concat", "Expand", "Tile"}
ELEMENTWISE = {"Mul", "Div", "Add", "Sub", "Where", "Clip", "Tanh", "Dropout"}
# TensorProto.DataType of what a cache can be -> (name, bytes)
DTYPES = {
    1: ("fp32", 4),
    2: ("uint8", 1),
    3: ("int8", 1),
    10: ("fp16", 2),
    11: ("fp64", 8),
    16: ("bf16", 2),
}
NARROW = (2, 3, 10, 16)
SCALES = {"key scale", "value scale"}


@dataclasses.dataclass
class _Input:
    """One graph input followed through the graph.

    roles: (index of the attention, what it is read as: key, value, or a scale of either).
    """

    name: str
    roles: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    copies: list[str] = dataclasses.field(default_factory=list)


def read(artifact: Artifact, directory: Path) -> ArtifactFacts:
    """Facts of the bundle's own graph; of the manifest only ``entry`` is used.

    Key/value heads that are inputs of their own are one cache tensor when the same attention reads
    them in the same roles. The token axis is the last dynamic one, else the second to last.

    Raises:
        BundleError: the file cannot be read. MissingDependencyError: no onnx.
    """
    graph = Graph(inside(directory, artifact.entry))
    attentions = [n for n in graph.nodes if n.op_type == "Softmax" or n.op_type in FUSED]
    layer_of = {n.output[0]: i for i, n in enumerate(attentions)}
    found = []
    for name in graph.inputs:
        if graph.shape(name) and graph.element_type(name) in DTYPES:
            followed = _follow(graph, name, layer_of)
            if followed.roles or name.startswith("past"):
                found.append(followed)
    groups: dict[Any, list[_Input]] = {}
    for item in found:
        groups.setdefault(tuple(sorted(item.roles)) or item.name, []).append(item)
    stored = {c.place: c for c in graph.constants()}
    return ArtifactFacts(
        cache_tensors=tuple(_tensor(graph, items) for items in groups.values()),
        cache_copies=tuple(dict.fromkeys(copy for item in found for copy in item.copies)),
        duplicate_weight_bytes=duplicate_bytes(graph),
        weight_bytes=sum(c.nbytes for c in stored.values()),
    )


def _tensor(graph: Graph, items: list[_Input]) -> CacheTensor:
    """One tensor from the inputs that hold its heads."""
    names, roles = [item.name for item in items], items[0].roles
    shape = graph.shape(names[0])
    dynamic = [i for i, size in enumerate(shape) if isinstance(size, str)]
    token_axis = dynamic[-1] if dynamic else len(shape) - 2
    sizes = [s for i, s in enumerate(shape) if i != token_axis and isinstance(s, int)]
    dtype, itemsize = DTYPES[graph.element_type(names[0])]
    read_as = {role for _, role in roles}
    return CacheTensor(
        name=names[0] if len(names) == 1 else f"{names[0]} (+{len(names) - 1})",
        layer=min((layer for layer, _ in roles), default=None),
        role="scale"
        if read_as & SCALES
        else "kv"
        if len(read_as) == 2
        else next(iter(read_as), "?"),
        dtype=dtype,
        shape=shape if len(names) == 1 else (len(names), *shape),
        elements_per_token=len(names) * math.prod(sizes),
        itemsize=itemsize,
    )


def _follow(graph: Graph, start: str, layer_of: dict[str, int]) -> _Input:
    """Walk every value that holds the whole of an input."""
    item, seen, todo = _Input(start), {start}, [start]
    while todo:
        value = todo.pop()
        if value in graph.outputs and value != start:
            item.copies.append(f"output {value} repeats {start}")
        for node in graph.consumers.get(value, []):
            if node.op_type in METADATA:
                continue
            if node.op_type in PRODUCTS:
                item.roles |= _roles_in_product(graph, node, value, layer_of)
            elif node.op_type == "Mul" and (
                scales := _roles_in_product(graph, node, value, layer_of, suffix=" scale")
            ):
                item.roles |= scales
            elif node.op_type in FUSED:
                _fused(graph, node, value, item, layer_of)
            else:
                if not _is_free(graph, node):
                    item.copies.append(f"{node.op_type} {node.name or node.output[0]} of {start}")
                fresh = [out for out in node.output if out and out not in seen]
                seen.update(fresh)
                todo.extend(fresh)
    return item


def _is_free(graph: Graph, node: Any) -> bool:
    """True for what the runtime does without another copy of the cache.

    Exchanging the last two axes in front of a product becomes an argument of the product. Widening
    a narrow cache in front of one lasts only while that view is read, and no kernel reads it as is.
    """
    if node.op_type in ALIASES:
        return True
    if node.op_type == "Transpose":
        perm = list(graph.attribute(node, "perm") or [])
        last = len(perm) - 1
        return perm == [*range(last - 1), last, last - 1] and _feeds_products(graph, node)
    if node.op_type == "Cast":
        source = node.input[0]
        narrow = source in graph.inputs and graph.element_type(source) in NARROW
        return narrow and graph.attribute(node, "to") == 1 and _feeds_products(graph, node)
    return False


def _feeds_products(graph: Graph, node: Any) -> bool:
    """True if every reader, through exchanges of axes, is a product."""
    readers = graph.consumers.get(node.output[0], [])
    return bool(readers) and all(
        r.op_type in PRODUCTS or (r.op_type == "Transpose" and _is_free(graph, r)) for r in readers
    )


def _roles_in_product(
    graph: Graph, node: Any, value: str, layer_of: dict[str, int], suffix: str = ""
) -> set[tuple[int, str]]:
    roles = set()
    for other in node.input:
        if other != value and (origin := _softmax_behind(graph, other)):
            roles.add((layer_of[origin], f"value{suffix}"))
    for softmax in _softmax_ahead(graph, node.output[0]):
        roles.add((layer_of[softmax], f"key{suffix}"))
    return roles


def _softmax_behind(graph: Graph, value: str) -> str | None:
    """The Softmax whose result ``value`` is, moved or scaled but not multiplied with anything."""
    for _ in range(len(graph.nodes)):
        node = graph.producer.get(value)
        if node is None:
            return None
        if node.op_type == "Softmax":
            return str(node.output[0])
        if node.op_type not in MOVES | {"Mul", "Div", "Dropout"}:
            return None
        value = node.input[0]
    return None


def _softmax_ahead(graph: Graph, value: str) -> set[str]:
    """Every Softmax that ``value`` reaches as scores."""
    found, seen, todo = set(), {value}, [value]
    while todo:
        for node in graph.consumers.get(todo.pop(), []):
            if node.op_type == "Softmax":
                found.add(str(node.output[0]))
            elif node.op_type in MOVES | ELEMENTWISE:
                fresh = [out for out in node.output if out not in seen]
                seen.update(fresh)
                todo.extend(fresh)
    return found


def _fused(graph: Graph, node: Any, value: str, item: _Input, layer_of: dict[str, int]) -> None:
    """Roles in an operator that is the whole attention, and whether it must copy its past."""
    past_key, past_value, key, value_in, presents = FUSED[node.op_type]
    name = node.name or node.output[0]
    for index, given in enumerate(node.input):
        if given != value or index not in (past_key, past_value, key, value_in):
            continue
        role = "key" if index in (past_key, key) else "value"
        item.roles.add((layer_of[node.output[0]], role))
        if index not in (past_key, past_value):
            continue
        if not presents:
            item.copies.append(f"{node.op_type} {name} joins {item.name} with the new rows")
            continue
        present = presents[role == "value"]
        output = node.output[present] if present < len(node.output) else ""
        if output not in graph.outputs:
            item.copies.append(
                f"{node.op_type} {name} gives no present {role}: the runtime copies {item.name}"
            )
