"""Any causal variant as a GPT-2: three projections, two cache tensors, the same function. No torch.

Shared weights are stored once per role; W_Q = I becomes an identity matrix. What the result costs
is what a runtime without a notion of shared keys and values makes of the model.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from edgeqkv.config import CONFIG, read_config
from edgeqkv.errors import CheckpointError, UnsupportedError
from edgeqkv.spec import ModelSpec

WEIGHTS = "model.safetensors"
NUMPY_FORMATS = {"F16", "F32", "F64"}  # bfloat16 is numpy's only where another package adds it
Tensors = dict[str, NDArray[np.float32]]


def read_model_dir(folder: Path) -> tuple[ModelSpec, Tensors]:
    """(spec, float32 weights) of a MODEL_DIR.

    Raises:
        CheckpointError: no MODEL_DIR, or weights that are damaged or not those of its config.
    """
    spec, _ = read_config(folder)
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="np") as f:
            formats = {f.get_slice(name).get_dtype() for name in f.keys()}  # noqa: SIM118
            if foreign := sorted(formats - NUMPY_FORMATS):
                raise CheckpointError(
                    f"{path} holds {foreign[0]} tensors; allowed here: "
                    f"{', '.join(sorted(NUMPY_FORMATS))}"
                )
            found = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from None
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if shapes != spec.parameter_shapes():
        raise CheckpointError(f"{path} does not hold the tensors of {spec.label}; import it again")
    return spec, {name: np.asarray(tensor, np.float32) for name, tensor in found.items()}


def as_qkv(spec: ModelSpec, tensors: Tensors, *, grouped: bool) -> tuple[ModelSpec, Tensors]:
    """The same function with three projections, all biases and the scale 1/sqrt(head_dim).

    ``grouped`` keeps the number of key/value heads; otherwise each is repeated for the query heads
    that read it.

    Raises:
        UnsupportedError: a variant that three linear projections cannot express.
    """
    _check(spec)
    groups = spec.num_key_value_heads if grouped else spec.num_attention_heads
    new = dataclasses.replace(
        spec,
        qkv_sharing="none",
        query_mode="projected",
        num_key_value_heads=groups,
        attention_scale=1 / math.sqrt(spec.head_dim),
        layer_norm_bias=True,
        linear_bias=True,
    )
    out: Tensors = {}
    for name, shape in new.parameter_shapes().items():
        if ".attn." in name and ".o_proj." not in name:
            continue
        out[name] = tensors[name] if name in tensors else np.zeros(shape, np.float32)
    for i in range(spec.num_hidden_layers):
        for kind in ("weight", "bias"):
            for role, tensor in _projections(spec, tensors, f"h.{i}.attn.", kind, groups).items():
                out[f"h.{i}.attn.{role}_proj.{kind}"] = tensor
    return new, out


def _check(spec: ModelSpec) -> None:
    reason = None
    if not spec.is_causal:
        reason = "it is not causal"
    elif spec.query_mode == "residual_gelu":
        reason = "its query is not linear in the input"
    elif spec.query_size != spec.hidden_size:
        reason = (
            f"its heads are {spec.query_size} wide in all, its hidden_size is {spec.hidden_size}"
        )
    if reason:
        raise UnsupportedError(f"{spec.label} cannot be written as a GPT-2: {reason}")


def _projections(
    spec: ModelSpec, tensors: Tensors, prefix: str, kind: str, groups: int
) -> dict[str, NDArray[np.float32]]:
    """q, k and v of one layer: weights [rows, hidden_size] or biases [rows]."""

    def stored(role: str, rows: int) -> NDArray[np.float32]:
        shape = (rows, spec.hidden_size) if kind == "weight" else (rows,)
        found = tensors.get(f"{prefix}{role}_proj.{kind}")
        return np.zeros(shape, np.float32) if found is None else found

    k = stored("k", spec.key_value_size)
    v = k if spec.key_is_value else stored("v", spec.key_value_size)
    q = k if spec.qkv_sharing in ("q=k", "q=k=v") else stored("q", spec.query_size)
    if spec.query_mode in ("identity", "residual") and kind == "weight":
        q = q + np.eye(spec.hidden_size, dtype=np.float32)
    return {
        "q": q * np.float32(spec.attention_scale * math.sqrt(spec.head_dim)),
        "k": _repeat(k, spec, groups),
        "v": _repeat(v, spec, groups),
    }


def _repeat(rows: NDArray[np.float32], spec: ModelSpec, groups: int) -> NDArray[np.float32]:
    per_head = rows.reshape(spec.num_key_value_heads, spec.head_dim, *rows.shape[1:])
    repeated = np.repeat(per_head, groups // spec.num_key_value_heads, axis=0)
    return repeated.reshape(-1, *rows.shape[1:])


def fused(tensors: Tensors, layer: int, kind: str) -> NDArray[np.float32]:
    """Rows of q, k and v under each other: GPT-2's ``c_attn``, here (out, in)."""
    return np.concatenate([tensors[f"h.{layer}.attn.{r}_proj.{kind}"] for r in "qkv"])


def write_hf_gpt2(folder: Path, spec: ModelSpec, tensors: Mapping[str, Any]) -> None:
    """``config.json`` and ``model.safetensors`` of Hugging Face's GPT2LMHeadModel; from :func:`as_qkv`
    with ``grouped=False``. Its ``Conv1D`` weights are (in, out)."""
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_position_embeddings,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_hidden_layers,
        "n_head": spec.num_attention_heads,
        "n_inner": spec.intermediate_size,
        "activation_function": spec.hidden_act,
        "layer_norm_epsilon": spec.layer_norm_eps,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "scale_attn_weights": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    state: dict[str, NDArray[np.float32]] = {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight":
            state[name] = tensor
        elif ".attn." not in name:
            linear = ".mlp." in name and tensor.ndim == 2
            state[f"transformer.{name}"] = tensor.T if linear else tensor
    for i in range(spec.num_hidden_layers):
        attn = f"transformer.h.{i}.attn"
        for kind in ("weight", "bias"):
            out = tensors[f"h.{i}.attn.o_proj.{kind}"]
            state[f"{attn}.c_attn.{kind}"] = fused(dict(tensors), i, kind).T
            state[f"{attn}.c_proj.{kind}"] = out.T
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in state.items()}
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
