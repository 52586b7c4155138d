"""A .pte as data: its program, its segments and the XNNPACK graphs inside its delegates."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

from edgeqkv.errors import BundleError, MissingDependencyError
from edgeqkv.quiet import quiet

_NO_ID = 2**32 - 1  # XNN_INVALID_VALUE_ID
_EXTERNAL_OUTPUT = 2  # XNN_VALUE_FLAG_EXTERNAL_OUTPUT
_INPUTS = ("input_id", "input1_id", "input2_id", "input3_id", "input4_id", "filter_id", "bias_id")


@dataclasses.dataclass(frozen=True)
class Pte:
    """program: ``executorch.exir.schema.Program``. base: file offset that segments start from."""

    path: Path
    program: Any
    base: int

    def segment(self, index: int) -> bytes:
        place = self.program.segments[index]
        return self.read(place.offset, place.size)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes at an offset of the segment area."""
        with self.path.open("rb") as f:
            f.seek(self.base + offset)
            return f.read(nbytes)


@dataclasses.dataclass(frozen=True)
class Node:
    kind: str
    inputs: tuple[int, ...]
    output: int


@dataclasses.dataclass(frozen=True)
class XnnGraph:
    """nodes in order; arguments: index of a delegate call's argument -> value id; outputs: those
    arguments that the delegate writes."""

    nodes: tuple[Node, ...]
    arguments: dict[int, int]
    outputs: frozenset[int]


def load_pte(path: Path) -> Pte:
    """Parse the program of a .pte; weights stay in the file.

    Raises:
        BundleError: not a readable .pte. MissingDependencyError: no executorch.
    """
    with quiet():
        try:
            from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program
            from executorch.exir._serialize._program import _get_extended_header
        except ImportError as e:
            raise MissingDependencyError(
                f"reading a .pte needs {e.name}; pip install 'edgeqkv[executorch]'"
            ) from None
        try:
            with path.open("rb") as f:
                start = f.read(64)
                header = _get_extended_header(start)
                if header is None or start[4:6] != b"ET":
                    raise ValueError("it has no ExecuTorch header")
                f.seek(0)
                program = _flatbuffer_to_program(f.read(header.program_size))
        except Exception as e:  # flatbuffers raises struct, index, unicode, type and value errors
            raise BundleError(f"{path} is not a readable .pte: {e}") from None
    size = path.stat().st_size - header.segment_base_offset
    if any(s.offset + s.size > size for s in program.segments):
        raise BundleError(f"{path} is cut short: a segment ends after the file does")
    return Pte(path, program, header.segment_base_offset)


def xnnpack_graph(pte: Pte, delegate: Any) -> XnnGraph | None:
    """The graph of one XNNPACK delegate; None for another backend or inlined data."""
    from executorch.backends.xnnpack.serialization import xnnpack_graph_serialize as xnn
    from executorch.exir._serialize._flatbuffer import _flatc_decompile

    if delegate.id != "XnnpackBackend" or delegate.processed.location != 1:
        return None
    data = pte.segment(delegate.processed.index)
    header = xnn.XNNHeader.from_bytes(data[: xnn.XNNHeader.EXPECTED_LENGTH])
    with tempfile.TemporaryDirectory() as folder:
        schema, payload = Path(folder, "schema.fbs"), Path(folder, "graph.bin")
        schema.write_bytes(xnn._get_schema_bytes())
        payload.write_bytes(data[header.flatbuffer_offset :][: header.flatbuffer_size])
        _flatc_decompile(folder, str(schema), str(payload), ["--raw-binary"])
        text = payload.with_suffix(".json").read_text("utf-8")
    graph = json.loads(re.sub(r": ([+-]?inf|nan)\b", r': "\1"', text))
    nodes = tuple(_node(n["xnode_union_type"], n["xnode_union"]) for n in graph["xnodes"])
    values = [v["xvalue_union"] for v in graph["xvalues"]]
    values = [v.get("tensor_value", v) for v in values]
    arguments = {v["external_id"]: v["id_out"] for v in values if v["external_id"] != _NO_ID}
    written = {v["external_id"] for v in values if v["flags"] & _EXTERNAL_OUTPUT}
    return XnnGraph(nodes, arguments, frozenset(written))


def _node(kind: str, fields: dict[str, Any]) -> Node:
    inputs = tuple(fields[name] for name in _INPUTS if name in fields)
    output = fields["output_id"] if "output_id" in fields else fields.get("output1_id", -1)
    return Node(kind.removeprefix("XNN"), inputs, output)


def constants(pte: Pte) -> dict[int, int]:
    """Offset in the constant segment -> bytes, of every constant tensor that a method uses."""
    program, found = pte.program, dict[int, int]()
    offsets = program.constant_segment.offsets if program.constant_segment else []
    for plan in program.execution_plan:
        for value in plan.values:
            t = value.val
            if 0 < getattr(t, "data_buffer_idx", 0) < len(offsets) and not t.allocation_info:
                place = offsets[t.data_buffer_idx]
                found[place] = max(found.get(place, 0), nbytes(t))
    return found


def nbytes(tensor: Any) -> int:
    elements: int = math.prod(tensor.sizes)
    return elements * ITEMSIZE.get(tensor.scalar_type.name, 4)


ITEMSIZE = {
    **dict.fromkeys(("BYTE", "CHAR", "BOOL"), 1),
    **dict.fromkeys(("SHORT", "HALF", "BFLOAT16"), 2),
    **dict.fromkeys(("INT", "FLOAT"), 4),
    **dict.fromkeys(("LONG", "DOUBLE"), 8),
}
