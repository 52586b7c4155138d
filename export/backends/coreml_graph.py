"""A view of a .mlpackage's protobuf as a graph: who makes a value, who reads it, what is stored.

Read from the package alone, so that an edited or foreign program is described as it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeqkv.errors import BundleError, MissingDependencyError
from edgeqkv.quiet import quiet

DATA = Path("Data", "com.apple.CoreML")
# Operations that only rename, reorder, pick, repeat or retype what goes through them.
_MOVES = ("reshape", "transpose", "expand_dims", "squeeze", "slice_by_index", "slice_by_size")
VIEWS = frozenset((*_MOVES, "cast", "identity", "split", "tile", "concat", "stack", "gather"))
ELEMENTWISE = frozenset(("add", "sub", "mul", "real_div", "select"))
DTYPE_NAMES = {"FLOAT16": "fp16", "FLOAT32": "fp32"}
# Header of one entry in weight.bin (MILBlob's blob_metadata): sentinel, dtype, bytes, data offset.
_SENTINEL = 0xDEADBEEF


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation: ``inputs`` parameter -> names of the values bound to it (literals left out)."""

    type: str
    inputs: dict[str, tuple[str, ...]]
    outputs: tuple[str, ...]
    proto: Any

    def one(self, parameter: str) -> str:
        """The single value bound to a parameter, "" where there is none."""
        return next(iter(self.inputs.get(parameter, ())), "")


@dataclasses.dataclass(frozen=True)
class Blob:
    """One constant in weight.bin: the value it defines, its place, size and content."""

    value: str
    offset: int
    nbytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Graph:
    """``states``: name -> (dtype as fp16/fp32 or Core ML's name, shape)."""

    ops: tuple[Op, ...]
    states: dict[str, tuple[str, tuple[int, ...]]]
    description: Any
    blobs: tuple[Blob, ...]
    producer: dict[str, Op]
    consumers: dict[str, list[Op]]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def of(self, *types: str) -> list[Op]:
        return [op for op in self.ops if op.type in types]

    def downstream(self, name: str, through: frozenset[str]) -> Iterator[tuple[Op, str]]:
        """(operation, value it reads) for all that read ``name``, continuing behind ``through``."""
        seen, stack = {name}, [name]
        while stack:
            value = stack.pop()
            for op in self.consumers.get(value, []):
                yield op, value
                fresh = [v for v in op.outputs if v not in seen] if op.type in through else []
                seen.update(fresh)
                stack += fresh

    def upstream(self, name: str, through: frozenset[str]) -> Iterator[Op]:
        """The operation that makes ``name`` and, as long as they are in ``through``, its makers."""
        seen, stack = {name}, [name]
        while stack:
            op = self.producer.get(stack.pop())
            if op is None:
                continue
            yield op
            if op.type in through:
                fresh = [v for vs in op.inputs.values() for v in vs if v not in seen]
                seen.update(fresh)
                stack += fresh


def load_graph(package: Path) -> Graph:
    """Read ``package`` (a .mlpackage folder).

    Raises:
        BundleError: it is not a readable mlprogram. MissingDependencyError: no coremltools.
    """
    try:
        with quiet():
            import coremltools as ct
    except ImportError:
        raise MissingDependencyError(
            "reading a Core ML bundle needs coremltools; pip install 'edgeqkv[coreml]'"
        ) from None
    try:
        with quiet():
            spec = ct.utils.load_spec(str(package))
        main = spec.mlProgram.functions["main"]
        operations = main.block_specializations[main.opset].operations
    except Exception as e:
        raise BundleError(f"{package} cannot be read as an mlprogram: {e}") from None
    if not operations:
        raise BundleError(f"{package} has no mlprogram function main")
    ops = tuple(
        Op(
            o.type,
            {
                key: tuple(a.name for a in argument.arguments if a.WhichOneof("binding") == "name")
                for key, argument in o.inputs.items()
            },
            tuple(v.name for v in o.outputs),
            o,
        )
        for o in operations
    )
    types = {v.name: v.type for o in operations for v in o.outputs}
    consumers: dict[str, list[Op]] = {}
    for op in ops:
        for name in dict.fromkeys(v for vs in op.inputs.values() for v in vs):
            consumers.setdefault(name, []).append(op)
    return Graph(
        ops=ops,
        states={
            v.name: (dtype_name(v.type.stateType.wrappedType), _shape(v.type.stateType.wrappedType))
            for v in main.inputs
            if v.type.WhichOneof("type") == "stateType"
        },
        description=spec.description,
        blobs=tuple(_blobs(ops, package)),
        producer={name: op for op in ops for name in op.outputs},
        consumers=consumers,
        shapes={name: _shape(type_) for name, type_ in types.items()},
        dtypes={name: dtype_name(type_) for name, type_ in types.items()},
    )


def _shape(type_: Any) -> tuple[int, ...]:
    """-1 stands for a dimension known only at run time."""
    return tuple(
        d.constant.size if d.WhichOneof("dimension") == "constant" else -1
        for d in type_.tensorType.dimensions
    )


def dtype_name(type_: Any) -> str:
    """``fp16`` or ``fp32``, any other in Core ML's spelling, e.g. ``UINT4``."""
    tensor = type_.tensorType
    enum = tensor.DESCRIPTOR.fields_by_name["dataType"].enum_type
    name = str(enum.values_by_number[tensor.dataType].name)
    return DTYPE_NAMES.get(name, name)


def _blobs(ops: tuple[Op, ...], package: Path) -> Iterator[Blob]:
    for op in ops:
        for value in _stored(op):
            path = package / DATA / "weights" / value.fileName.split("/")[-1]
            try:
                with path.open("rb") as f:
                    f.seek(value.offset)
                    header = f.read(24)
                    if int.from_bytes(header[:4], "little") != _SENTINEL:
                        raise BundleError(f"{path}: no weight at offset {value.offset}")
                    nbytes = int.from_bytes(header[8:16], "little")
                    f.seek(int.from_bytes(header[16:24], "little"))
                    data = f.read(nbytes)
            except OSError as e:
                raise BundleError(f"{path} cannot be read: {e.strerror}") from None
            if len(data) != nbytes:
                raise BundleError(f"{path} is cut short at offset {value.offset}")
            yield Blob(op.outputs[0], value.offset, nbytes, hashlib.sha256(data).hexdigest())


def _stored(op: Op) -> Iterator[Any]:
    """References into weight.bin that an operation carries, as attributes or as literals."""
    values = list(op.proto.attributes.values())
    values += [a.value for i in op.proto.inputs.values() for a in i.arguments if not a.name]
    for value in values:
        if value.WhichOneof("value") == "blobFileValue":
            yield value.blobFileValue
