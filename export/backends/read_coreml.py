"""What a .mlpackage really holds: its states, how attention reads them, what it stores twice."""

from __future__ import annotations

import re
from pathlib import Path

from edgeqkv.artifact import Artifact, inside
from edgeqkv.cache import DTYPE_BYTES
from export.backends.coreml_graph import ELEMENTWISE, VIEWS, Graph, Op, load_graph
from export.backends.coreml_lint import lint
from export.facts import ArtifactFacts, CacheTensor

# slice_update hands on the state it updates, so a read goes through it too.
READ_PATH = VIEWS | {"slice_update"}
REPEATS = frozenset({"tile", "gather", "upsample_nearest_neighbor"})


def read(artifact: Artifact, directory: Path) -> ArtifactFacts:
    """Facts from the package's own protobuf; of the manifest only ``entry`` is used.

    A state's token axis is the one its update's start is computed for, else the second to last.
    weight_bytes counts each stored constant once per place in weight.bin.

    Raises:
        BundleError: the package cannot be read. MissingDependencyError: no coremltools.
    """
    graph = load_graph(inside(directory, artifact.entry))
    places = {blob.offset: blob for blob in graph.blobs}
    distinct = {blob.sha256: blob.nbytes for blob in places.values()}
    stored = sum(blob.nbytes for blob in places.values())
    return ArtifactFacts(
        cache_tensors=tuple(_tensor(graph, name) for name in graph.states),
        cache_copies=tuple(copy for name in graph.states for copy in _copies(graph, name)),
        duplicate_weight_bytes=stored - sum(distinct.values()),
        weight_bytes=stored,
        warnings=tuple(lint(graph)),
    )


def _tensor(graph: Graph, name: str) -> CacheTensor:
    dtype, shape = graph.states[name]
    digits = re.search(r"(?:^|[._])(\d+)(?:[._]|$)", name)
    elements = 1
    for axis, size in enumerate(shape):
        elements *= 1 if axis == _token_axis(graph, name) else size
    return CacheTensor(
        name=name,
        layer=int(digits[1]) if digits else None,
        role=_role(graph, name),
        dtype=dtype,
        shape=shape,
        elements_per_token=elements,
        itemsize=DTYPE_BYTES.get(dtype, 2),
    )


def _reads(graph: Graph, state: str) -> list[Op]:
    return [op for op in graph.of("read_state") if op.one("input") == state]


def _writes(graph: Graph, state: str) -> list[Op]:
    writes = [op for op in graph.of("write_state") if op.one("input") == state]
    return writes + [op for op in graph.of("coreml_update_state") if op.one("state") == state]


def _written(write: Op) -> str:
    return write.one("data") or write.one("value")


def _token_axis(graph: Graph, state: str) -> int:
    """The only axis whose start is not a constant: ``begin`` is a concat of one value per axis."""
    for write in _writes(graph, state):
        update = graph.producer.get(_written(write))
        begin = graph.producer.get(update.one("begin")) if update else None
        if begin and begin.type == "concat":
            makers = [graph.producer.get(v) for v in begin.inputs["values"]]
            moving = [i for i, op in enumerate(makers) if op is None or op.type != "const"]
            if len(moving) == 1:
                return moving[0]
    return len(graph.states[state][1]) - 2


def _role(graph: Graph, state: str) -> str:
    """``key`` when a matmul on the state leads to a softmax, ``value`` when a softmax leads to it."""
    roles = set()
    for read_op in _reads(graph, state):
        for op, operand in graph.downstream(read_op.outputs[0], READ_PATH):
            if op.type == "scaled_dot_product_attention":
                roles |= {p for p in ("key", "value") if op.one(p) == operand}
            elif op.type == "matmul":
                roles.add(_matmul_role(graph, op, operand))
    roles.discard("")
    return "kv" if roles == {"key", "value"} else roles.pop() if len(roles) == 1 else "?"


def _matmul_role(graph: Graph, matmul: Op, operand: str) -> str:
    through = VIEWS | ELEMENTWISE
    for other in {matmul.one("x"), matmul.one("y")} - {operand}:
        if any(op.type == "softmax" for op in graph.upstream(other, through)):
            return "value"
    reached = (op for op, _ in graph.downstream(matmul.outputs[0], through))
    return "key" if any(op.type == "softmax" for op in reached) else ""


def _copies(graph: Graph, state: str) -> list[str]:
    """Operations that rewrite, widen or repeat the whole state on a step."""
    found = []
    writes, reads = _writes(graph, state), _reads(graph, state)
    if len(writes) > 1:
        found.append(f"{state} is written {len(writes)} times per step")
    whole = set()
    for write in writes:
        update = graph.producer.get(_written(write))
        updated = graph.producer.get(update.one("x")) if update else None
        if update is None or update.type != "slice_update":
            maker = update.type if update else "an input"
            found.append(f"{state} is rewritten whole by {maker} {_written(write)}")
            whole.add(_written(write))
        elif updated not in reads:
            found.append(f"{state} is rewritten whole: {_written(write)} updates another tensor")
    for read_op in reads:
        for op, operand in graph.downstream(read_op.outputs[0], READ_PATH):
            if whole & set(op.outputs):
                continue  # said already
            if op.type in REPEATS or (op.type in ("concat", "stack") and _is_data(op, operand)):
                found.append(f"{state} is copied by {op.type} {op.outputs[0]}")
            elif op.type == "cast":
                found.append(
                    f"{state} is copied to {graph.dtypes[op.outputs[0]]} by cast {op.outputs[0]}"
                )
    return list(dict.fromkeys(found))


def _is_data(op: Op, operand: str) -> bool:
    return operand in op.inputs.get("values", ())
