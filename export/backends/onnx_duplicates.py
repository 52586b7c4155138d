"""Which weights an ONNX file stores more than once: as they are, transposed, or rounded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.backends.onnx_graph import Constant, Graph

QUANTISED = {"MatMulNBits", "GatherBlockQuantized"}
# Operators through which a scale goes from where it is stored to the one that reads it.
SCALE_MOVES = {"Cast", "Reshape", "Unsqueeze", "Squeeze", "Expand"}
SAMPLE = 64  # rows of a quantised matrix that are compared with others
# Cosine from which two matrices are one, rounded differently: rounding to 4 bits gives 0.99 on
# trained weights; two different matrices of a trained model are below 0.3.
ALIKE = 0.95
Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """[out, in] as a product or a lookup means it. rows(i): those rows, float32."""

    shape: tuple[int, int]
    nbytes: int
    packed: Constant
    scale: Constant
    bits: int
    block: int

    def rows(self, index: Array) -> Array:
        stored = self.packed.read().reshape(self.shape[0], -1)[index]
        if self.bits == 4:
            stored = np.stack([stored & 15, stored >> 4], -1).reshape(len(index), -1)
        blocks = stored.reshape(len(index), -1, self.block).astype(np.float32)
        scale = self.scale.read().reshape(self.shape[0], -1)[index].astype(np.float32)
        scale = np.repeat(scale, blocks.shape[1] // scale.shape[1], axis=1)
        found: Array = (blocks - 2 ** (self.bits - 1)) * scale[..., None]
        return found.reshape(len(index), -1)


def duplicate_bytes(graph: Graph) -> int:
    """Bytes of matrices that are stored again, in whatever number format."""
    stored = {c.place: c for c in graph.constants()}
    quantised = _quantised(graph)
    packed = {m.packed.place for m in quantised}
    plain = [c for place, c in stored.items() if place not in packed]
    return _equal_bytes(list(stored.values())) + _rounded_bytes(quantised, plain)


def _equal_bytes(constants: list[Constant]) -> int:
    """Only matrices: equal vectors (biases of zero, norms of one) are what training or its absence
    made of them. A matrix and its transpose have the same diagonal, so few are compared in full.
    """
    kept: dict[Any, list[Constant]] = {}
    duplicate = 0
    for constant in constants:
        if len(constant.shape) < 2 or constant.nbytes < 64:
            continue
        array = _matrix(constant)
        key = (constant.dtype, *sorted(array.shape), array.diagonal().tobytes())
        rivals = kept.setdefault(key, [])
        if any(_same(array, _matrix(rival)) for rival in rivals):
            duplicate += constant.nbytes
        else:
            rivals.append(constant)
    return duplicate


def _matrix(constant: Constant) -> Array:
    array = constant.read()
    return array.reshape(-1, array.shape[-1])


def _same(a: Array, b: Array) -> bool:
    return np.array_equal(a, b) or np.array_equal(a, b.T)


def _quantised(graph: Graph) -> list[_Matrix]:
    """Every matrix of integers that an operator reads, each stored one once."""
    by_name = {c.name: c for c in graph.constants()}
    found: dict[Any, _Matrix] = {}
    for node in graph.nodes:
        if node.op_type not in QUANTISED:
            continue
        multiplies = node.op_type == "MatMulNBits"
        packed = by_name.get(node.input[0 if not multiplies else 1])
        scale = by_name.get(_origin(graph, node.input[2]))
        if packed is None or scale is None:
            continue
        bits, block = graph.attribute(node, "bits"), graph.attribute(node, "block_size")
        if multiplies:
            shape = (graph.attribute(node, "N"), graph.attribute(node, "K"))
        else:
            shape = (packed.shape[0], packed.nbytes * 8 // bits // packed.shape[0])
        nbytes = packed.nbytes + scale.nbytes
        found.setdefault(packed.place, _Matrix(shape, nbytes, packed, scale, bits, block))
    return list(found.values())


def _origin(graph: Graph, name: str) -> str:
    """The stored tensor that ``name`` is, cast or reshaped."""
    while (node := graph.producer.get(name)) is not None and node.op_type in SCALE_MOVES:
        name = node.input[0]
    return name


def _rounded_bytes(quantised: list[_Matrix], plain: list[Constant]) -> int:
    """Bytes of the larger of every two matrices that differ by no more than rounding, one being quantised."""
    duplicate, counted = 0, set()
    for i, matrix in enumerate(quantised):
        n, k = matrix.shape
        index = np.linspace(0, n - 1, min(n, SAMPLE)).astype(np.int64)
        ours = matrix.rows(index)
        for other in quantised[:i]:
            if other.shape == matrix.shape and _alike(ours, other.rows(index)):
                duplicate += max(matrix.nbytes, other.nbytes)
        for constant in plain:
            if constant.place in counted or sorted(constant.shape) != sorted((n, k)):
                continue
            array = constant.read()
            views = [a for a in (array, array.T) if a.shape == (n, k)]
            if any(_alike(ours, a[index].astype(np.float32)) for a in views):
                counted.add(constant.place)
                duplicate += constant.nbytes
    return duplicate


def _alike(a: Array, b: Array) -> bool:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return norms > 0 and float((a * b).sum()) / norms > ALIKE
