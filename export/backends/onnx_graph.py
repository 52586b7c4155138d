"""An ONNX graph as a reader of artifacts needs it: who makes and who reads a value, and constants."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeqkv.artifact import inside
from edgeqkv.errors import BundleError, MissingDependencyError


@dataclasses.dataclass(frozen=True)
class Constant:
    """A stored tensor. ``place``: (file, offset), the same for two names that share bytes.

    ``read`` maps or decodes the numbers; raw bytes [nbytes] for a type numpy has not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: int
    nbytes: int
    place: tuple[str, int]
    read: Callable[[], NDArray[Any]]


class Graph:
    """``model`` is the ModelProto, without external data."""

    def __init__(self, path: Path) -> None:
        try:
            import onnx
        except ImportError:
            raise MissingDependencyError(
                "reading an ONNX bundle needs onnx; pip install 'edgeqkv[onnx]'"
            ) from None
        try:
            self.model: Any = onnx.load(path, load_external_data=False)
        except Exception as e:  # protobuf's DecodeError among others
            raise BundleError(f"{path} is not an ONNX model: {e}") from None
        self.directory = path.parent
        graph = self.model.graph
        self.nodes: list[Any] = list(graph.node)
        self.producer = {out: node for node in self.nodes for out in node.output if out}
        self.consumers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                self.consumers.setdefault(name, []).append(node)
        stored = {tensor.name for tensor in graph.initializer}
        self.inputs: dict[str, Any] = {v.name: v for v in graph.input if v.name not in stored}
        self.outputs = [v.name for v in graph.output]

    def attribute(self, node: Any, name: str) -> Any:
        """The value of an attribute, None where the node leaves it out."""
        import onnx

        found = [a for a in node.attribute if a.name == name]
        return onnx.helper.get_attribute_value(found[0]) if found else None

    def element_type(self, name: str) -> int:
        """TensorProto.DataType of a graph input."""
        return int(self.inputs[name].type.tensor_type.elem_type)

    def shape(self, name: str) -> tuple[int | str, ...]:
        """Dimensions of a graph input: a number, or the name of a dynamic one (``?`` without)."""
        dims = self.inputs[name].type.tensor_type.shape.dim
        return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims)

    def constants(self) -> Iterator[Constant]:
        """Initializers, then the values of Constant nodes.

        Raises:
            BundleError: external data outside the bundle, or shorter than it should be.
        """
        values = [a.t for n in self.nodes if n.op_type == "Constant" for a in n.attribute]
        for index, tensor in enumerate([*self.model.graph.initializer, *values]):
            yield _constant(self.directory, tensor, index)


def _constant(directory: Path, tensor: Any, index: int) -> Constant:
    import onnx

    shape = tuple(tensor.dims)
    dtype, bits = _numpy_type(tensor.data_type)
    nbytes = math.ceil(math.prod(shape) * bits / 8)
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return Constant(
            tensor.name,
            shape,
            tensor.data_type,
            nbytes,
            ("", index),
            lambda: np.asarray(onnx.numpy_helper.to_array(tensor)),
        )
    entry = {e.key: e.value for e in tensor.external_data}
    path, offset = inside(directory, entry.get("location", "")), int(entry.get("offset", 0))
    if not path.is_file() or path.stat().st_size < offset + nbytes:
        raise BundleError(f"{path} is too short for tensor {tensor.name}; export the bundle again")

    def read() -> NDArray[Any]:
        raw = np.memmap(path, np.uint8, "r", offset, (nbytes,))
        return raw if dtype is None else raw.view(dtype).reshape(shape)

    return Constant(tensor.name, shape, tensor.data_type, nbytes, (path.name, offset), read)


def _numpy_type(data_type: int) -> tuple[np.dtype[Any] | None, int]:
    """(numpy type or None, bits per element) of a TensorProto.DataType."""
    import onnx

    if data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        return None, 4
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(data_type))
    return (None if dtype.hasobject else dtype), dtype.itemsize * 8
