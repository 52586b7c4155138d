"""A reference interpreter of mlprograms: what a .mlpackage computes, on machines without Core ML.

It reads the package's own protobuf and weights and walks ``main`` in order, so it checks what was
written to disk, not what was meant. It says nothing about Apple's kernels or speed.

Arithmetic is numpy's in the dtype the program declares for each value. Reductions (linear, matmul,
layer_norm, softmax) accumulate in float32 and round once; numpy would otherwise sum squares in
float16, where 256**2 is already infinite. Everything else is the operation's own
``value_inference`` of coremltools, an internal interface: coremltools is pinned to 9.0.
"""

from __future__ import annotations

import types as python_types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeqkv.errors import BundleError, MissingDependencyError, UnsupportedError
from edgeqkv.quiet import quiet

Array = NDArray[Any]
States = dict[str, Array]
WEIGHTS = Path("Data", "com.apple.CoreML", "weights")


class MILInterpreter:
    """``predict`` and ``make_state`` as ``coremltools.models.MLModel`` has them, in numpy.

    Raises:
        BundleError: the package cannot be read. MissingDependencyError: no coremltools.
    """

    def __init__(self, package: Path) -> None:
        try:
            with quiet():
                import coremltools as ct
                from coremltools.converters.mil.frontend.milproto.load import load
                from coremltools.converters.mil.mil import types
        except ImportError:
            raise MissingDependencyError(
                "coremltools is not installed; pip install 'edgeqkv[coreml]'"
            ) from None
        try:
            with quiet():
                spec = ct.utils.load_spec(str(package))
                program = load(
                    spec,
                    specification_version=spec.specificationVersion,
                    file_weights_dir=str(package / WEIGHTS),
                )
        except Exception as e:
            raise BundleError(
                f"{package} cannot be read as an mlprogram: {e}; export the bundle again"
            ) from None
        self.types = types
        main = program.functions["main"]
        self.inputs: dict[str, Any] = dict(main.inputs)
        self.outputs: list[Any] = list(main.outputs)
        self.operations = [op for op in main.operations if op.op_type != "const"]
        self.dtypes = {
            id(var): types.nptype_from_builtin(var.dtype)
            for op in self.operations
            for var in op.outputs
        }
        self.state_shapes = {
            state.name: tuple(state.type.stateType.arrayType.shape)
            for state in spec.description.state
        }
        self.widened: dict[int, Array] = {}
        # Compressed weights are constants too: made once, in the dtype that the program declares.
        self.constants = [op for op in self.operations if op.op_type.startswith("constexpr_")]
        for op in self.constants:
            self._step(op, {})
        self.operations = [op for op in self.operations if op not in self.constants]

    def make_state(self) -> States:
        """Every state of the program, zeroed."""
        return {name: np.zeros(shape, np.float16) for name, shape in self.state_shapes.items()}

    def predict(self, feeds: Mapping[str, Array], state: States | None = None) -> dict[str, Array]:
        """Run ``main`` once; ``state`` is updated in place, outputs come back by name."""
        states = {} if state is None else state
        for name, value in feeds.items():
            self._set(self.inputs[name], value)
        for op in self.operations:
            self._step(op, states)
        return {var.name: np.asarray(var.val) for var in self.outputs}

    def _step(self, op: Any, states: States) -> None:
        if op.op_type == "read_state":
            self._set(op.outputs[0], states[op.input.name])
            return
        if op.op_type == "coreml_update_state":
            value = np.asarray(op.value.val)
            states[op.state.name] = value
            self._set(op.outputs[0], value)
            return
        own = OPERATIONS.get(op.op_type)
        try:
            results = own(self, op) if own else op.value_inference()
        except NotImplementedError:
            results = None
        if results is None:
            raise UnsupportedError(
                f"the Core ML interpreter has no implementation of {op.op_type} ({op.name}); "
                "run this bundle on macOS 15 or newer"
            )
        for var, value in zip(
            op.outputs, results if isinstance(results, (tuple, list)) else [results], strict=True
        ):
            self._set(var, np.asarray(value, dtype=self.dtypes[id(var)]))

    def _set(self, var: Any, value: Array) -> None:
        """Give a value to a variable, and its shape: some operations ask for that instead."""
        value = np.asarray(value)
        var._sym_val = python_types.SimpleNamespace(val=value)
        if value.shape != var.shape:
            var._sym_type = self.types.tensor(var.dtype, value.shape)

    def wide(self, var: Any) -> Array:
        """A value as float32; constants are converted once."""
        value = np.asarray(var.val)
        if value.dtype == np.float32:
            return value
        if var.op is None or not var.op.op_type.startswith("const"):  # const, constexpr_*
            return value.astype(np.float32)
        if id(var) not in self.widened:
            self.widened[id(var)] = value.astype(np.float32)
        return self.widened[id(var)]


def _blockwise_shift_scale(run: MILInterpreter, op: Any) -> Array:
    """(data - offset) * scale, each scale and offset for a block of the data."""
    data = np.asarray(op.data.val).astype(np.float32)
    parts = [np.asarray(v.val) for v in (op.scale, op.offset) if v is not None]
    scale, *offset = (_spread(part.astype(np.float32), data.shape) for part in parts)
    out: Array = (data - offset[0] if offset else data) * scale
    return out


def _spread(blocks: Array, shape: tuple[int, ...]) -> Array:
    for axis, size in enumerate(shape):
        blocks = np.repeat(blocks, size // blocks.shape[axis], axis)
    return blocks


def _linear(run: MILInterpreter, op: Any) -> Array:
    out: Array = run.wide(op.x) @ run.wide(op.weight).T
    return out if op.bias is None else out + run.wide(op.bias)


def _matmul(run: MILInterpreter, op: Any) -> Array:
    x, y = run.wide(op.x), run.wide(op.y)
    x = np.swapaxes(x, -1, -2) if op.transpose_x.val else x
    y = np.swapaxes(y, -1, -2) if op.transpose_y.val else y
    out: Array = x @ y
    return out


def _layer_norm(run: MILInterpreter, op: Any) -> Array:
    x, axes = run.wide(op.x), tuple(op.axes.val)
    centred = x - x.mean(axes, keepdims=True)
    variance = np.square(centred).mean(axes, keepdims=True)
    out: Array = centred / np.sqrt(variance + np.float32(op.epsilon.val))
    out = out if op.gamma is None else out * run.wide(op.gamma)
    return out if op.beta is None else out + run.wide(op.beta)


def _softmax(run: MILInterpreter, op: Any) -> Array:
    x, axis = run.wide(op.x), int(op.axis.val)
    exp = np.exp(x - x.max(axis, keepdims=True))
    out: Array = exp / exp.sum(axis, keepdims=True)
    return out


OPERATIONS: dict[str, Callable[[MILInterpreter, Any], Array]] = {
    "constexpr_blockwise_shift_scale": _blockwise_shift_scale,
    "linear": _linear,
    "matmul": _matmul,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
}
