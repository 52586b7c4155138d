"""What a .pte really holds: its cache buffers, how attention reads them, what it stores twice."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from edgeqkv.artifact import Artifact, inside
from edgeqkv.quiet import quiet
from export.backends.executorch_pte import (
    ITEMSIZE,
    Pte,
    XnnGraph,
    constants,
    load_pte,
    xnnpack_graph,
)
from export.facts import ArtifactFacts, CacheTensor

_DTYPES = {"FLOAT": "fp32", "HALF": "fp16"}
# Kernels that read a cache without copying it: argument index -> role.
_READERS = {"llama::custom_sdpa": {1: "key", 2: "value"}, "aten::bmm": {0: "?", 1: "?"}}
_RESHAPE = frozenset({"StaticReshape"})
_ELEMENTWISE = _RESHAPE | {"StaticTranspose", "Add", "Multiply", "Subtract", "Divide", "Clamp"}


@dataclasses.dataclass(frozen=True)
class Call:
    """One instruction: a kernel by name, or a delegate; ``args`` index the plan's values."""

    name: str
    args: tuple[int, ...]
    delegate: Any = None


def read(artifact: Artifact, directory: Path) -> ArtifactFacts:
    """Facts from the program itself; of the manifest only ``entry`` is used.

    cache_tensors are those of the method that costs the most per token; every method is searched
    for copies.

    Raises:
        BundleError: not a readable .pte. MissingDependencyError: no executorch.
    """
    pte = load_pte(inside(directory, artifact.entry))
    with quiet():
        methods = [_Method(pte, plan) for plan in pte.program.execution_plan]
        tensors = [[m.cache_tensor(s) for s in m.states] for m in methods]
        copies = [copy for m in methods for s in m.states for copy in m.copies(s)]
    worst = max(tensors, key=_cost, default=[])
    stored, repeated = _weights(pte)
    return ArtifactFacts(
        cache_tensors=tuple(worst),
        cache_copies=tuple(dict.fromkeys(copies)),
        duplicate_weight_bytes=repeated,
        weight_bytes=stored,
        warnings=tuple(_warnings(methods)),
    )


def _cost(tensors: list[CacheTensor]) -> tuple[int, int]:
    sizes = [math.prod(int(n) for n in t.shape) for t in tensors]
    return sum(t.elements_per_token * t.itemsize for t in tensors), sum(sizes)


class _Method:
    """One execution plan. ``states``: value index -> name of the buffers that outlive a call."""

    def __init__(self, pte: Pte, plan: Any) -> None:
        self.pte, self.plan = pte, plan
        self.calls = list(_calls(plan))
        self.graphs: dict[int, XnnGraph | None] = {}
        self.states = self._states()

    def tensor(self, index: int) -> Any:
        """The tensor at a value index, or None."""
        value = self.plan.values[index].val if index >= 0 else None
        return value if hasattr(value, "scalar_type") else None

    def _states(self) -> dict[int, str]:
        named: dict[int, str] = {}
        for i in range(len(self.plan.values)):
            t = self.tensor(i)
            extra = t.extra_tensor_info if t is not None and t.allocation_info else None
            if extra is not None and extra.fully_qualified_name:
                named[i] = extra.fully_qualified_name
        # Names are optional in a .pte: a planned tensor written in place that nothing made before.
        made = set(self.plan.inputs)
        for call in self.calls:
            target = _in_place(call)
            t = self.tensor(target) if target is not None else None
            if target is not None and t is not None and t.allocation_info and target not in made:
                named.setdefault(target, f"buffer_{target}")
            made.update(self._outputs(call))
        return named

    def _outputs(self, call: Call) -> Iterable[int]:
        """Value indices that a call makes; in-place targets are not made."""
        if call.delegate is not None:
            graph = self.graph(call)
            return [a for i, a in enumerate(call.args) if graph is None or i in graph.outputs]
        if not call.args or _in_place(call) is not None:
            return []
        last = self.plan.values[call.args[-1]].val
        return [call.args[-1], *getattr(last, "items", [])]

    def graph(self, call: Call) -> XnnGraph | None:
        key = call.delegate.processed.index
        if key not in self.graphs:
            self.graphs[key] = xnnpack_graph(self.pte, call.delegate)
        return self.graphs[key]

    def uses(self, state: int) -> Iterator[tuple[Call, int]]:
        """(call, argument index) of every read of a state."""
        for call in self.calls:
            if _in_place(call) != state:
                yield from ((call, i) for i, arg in enumerate(call.args) if arg == state)

    def cache_tensor(self, state: int) -> CacheTensor:
        name, tensor = self.states[state], self.tensor(state)
        digits = re.search(r"(?:^|[._])(\d+)(?:[._]|$)", name)
        axis = self._token_axis(state)
        return CacheTensor(
            name=name,
            layer=int(digits[1]) if digits else None,
            role=self._role(state),
            dtype=_DTYPES.get(tensor.scalar_type.name, tensor.scalar_type.name.lower()),
            shape=tuple(tensor.sizes),
            elements_per_token=math.prod(n for i, n in enumerate(tensor.sizes) if i != axis),
            itemsize=ITEMSIZE.get(tensor.scalar_type.name, 4),
        )

    def _token_axis(self, state: int) -> int:
        """The axis that rows are written along; the second to last where the write does not say."""
        for call in self.calls:
            if _in_place(call) == state and call.name == "llama::update_cache":
                return 1
            if _in_place(call) == state and call.name.startswith("aten::index_put"):
                indices = self.plan.values[call.args[1]].val.items
                return next((i for i, index in enumerate(indices) if index >= 0), 0)
        return len(self.tensor(state).sizes) - 2

    def _role(self, state: int) -> str:
        roles: set[str] = set()
        for call, argument in self.uses(state):
            if call.delegate is None:
                roles.add(_READERS.get(call.name, {}).get(argument, ""))
            elif graph := self.graph(call):
                roles |= _xnn_roles(graph, graph.arguments.get(argument))
        roles.discard("")
        return "kv" if roles == {"key", "value"} else roles.pop() if len(roles) == 1 else "?"

    def copies(self, state: int) -> Iterator[str]:
        """Operations that rewrite, widen or repeat the whole buffer on a step."""
        name, size = self.states[state], math.prod(self.tensor(state).sizes)
        for call, argument in self.uses(state):
            if call.delegate is not None:
                if graph := self.graph(call):
                    yield from (
                        f"{name} is copied by XNNPACK's {kind} in {self.plan.name}"
                        for kind in _xnn_copies(graph, graph.arguments.get(argument))
                    )
            elif call.name not in _READERS and self._output_size(call) >= size:
                yield f"{name} is copied by {call.name} in {self.plan.name}"
        for call in self.calls:
            if _in_place(call) == state and call.name == "aten::copy_":
                yield f"{name} is rewritten whole by aten::copy_ in {self.plan.name}"

    def _output_size(self, call: Call) -> int:
        """Elements of what a kernel writes: its last argument, views aside."""
        if call.name == "executorch_prim::et_view":
            return 0
        out = self.tensor(call.args[-1]) if call.args else None
        return 0 if out is None else math.prod(out.sizes)


def _calls(plan: Any) -> Iterator[Call]:
    for chain in plan.chains:
        for instruction in chain.instructions:
            a = instruction.instr_args
            if hasattr(a, "op_index"):
                yield Call(plan.operators[a.op_index].name, tuple(a.args))
            elif hasattr(a, "delegate_index"):
                yield Call("delegate", tuple(a.args), plan.delegates[a.delegate_index])


def _in_place(call: Call) -> int | None:
    """Value index that a kernel updates in place: trailing underscore, or update_cache's cache."""
    if call.name == "llama::update_cache":
        return call.args[1]
    return call.args[0] if call.delegate is None and call.name.endswith("_") else None


def _downstream(graph: XnnGraph, value: int, through: frozenset[str]) -> Iterator[tuple[Any, int]]:
    """(node, the operand it takes) reached from a value by way of ``through`` nodes."""
    reached = {value}
    for node in graph.nodes:
        for operand in reached.intersection(node.inputs):
            yield node, operand
            if node.kind in through:
                reached = reached | {node.output}


def _xnn_roles(graph: XnnGraph, value: int | None) -> set[str]:
    """``key`` when a product with the value leads to a softmax, ``value`` when a softmax leads to it."""
    roles: set[str] = set()
    if value is None:
        return roles
    softmaxed = {n.output for n in graph.nodes if n.kind == "Softmax"}
    weights = set(softmaxed)
    for output in softmaxed:
        reached = _downstream(graph, output, _ELEMENTWISE)
        weights |= {n.output for n, _ in reached if n.kind in _ELEMENTWISE}
    for node, operand in _downstream(graph, value, _RESHAPE | {"StaticTranspose", "Convert"}):
        if node.kind == "BatchMatrixMultiply":
            if weights.intersection(set(node.inputs) - {operand}):
                roles.add("value")
            after = _downstream(graph, node.output, _ELEMENTWISE)
            if any(n.kind == "Softmax" for n, _ in after):
                roles.add("key")
    return roles


def _xnn_copies(graph: XnnGraph, value: int | None) -> Iterable[str]:
    if value is None:
        return []
    allowed = _RESHAPE | {"BatchMatrixMultiply"}
    return [n.kind for n, _ in _downstream(graph, value, _RESHAPE) if n.kind not in allowed]


def _weights(pte: Pte) -> tuple[int, int]:
    """(bytes of all constants, bytes of those stored again at another place of the file)."""
    program = pte.program
    segments = [program.segments[named.segment_index] for named in program.named_data or []]
    places = {segment.offset: segment.size for segment in segments}
    if inner := constants(pte):
        start = program.segments[program.constant_segment.segment_index].offset
        for offset, size in inner.items():
            places[start + offset] = max(places.get(start + offset, 0), size)
    stored = sum(places.values())
    distinct = {hashlib.sha256(pte.read(o, n)).digest(): n for o, n in places.items()}
    return stored, stored - sum(distinct.values())


def _warnings(methods: list[_Method]) -> Iterator[str]:
    names = {call.name for m in methods for call in m.calls}
    if llm := sorted(n for n in names if n.startswith("llama::")):
        yield f"{', '.join(llm)}: loads only in a runner built with ExecuTorch's LLM operators"
    if lookups := sorted(n for n in names if n.startswith("quantized_decomposed::")):
        yield f"{', '.join(lookups)}: loads only in a runner built with ExecuTorch's quantized kernels"
    backends = {d.id for m in methods for d in m.plan.delegates}
    if foreign := sorted(backends - {"XnnpackBackend"}):
        yield f"delegates to {', '.join(foreign)}, which this audit cannot look into"
