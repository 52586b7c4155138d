"""MODEL_DIR: ``config.json`` + ``model.safetensors`` (+ ``tokenizer.json``), read and written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from edgeqkv.config import CONFIG, MAKE_ONE, MODEL_TYPE
from edgeqkv.config import read_config as read_config
from edgeqkv.errors import CheckpointError
from edgeqkv.files import new_folder
from edgeqkv.model import Decoder
from edgeqkv.spec import ModelSpec

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"


def save_model_dir(
    target: Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    provenance: Mapping[str, Any],
    *,
    tokenizer_json: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write MODEL_DIR. ``state`` has exactly the tensors of ``spec.parameter_shapes()``."""
    check_state(spec, state, str(target))
    config = {
        "model_type": MODEL_TYPE,
        "architectures": ["EdgeQKVForCausalLM"],
        **spec.to_dict(),
        "provenance": dict(provenance),
    }
    with new_folder(target, overwrite=overwrite) as folder:
        text = json.dumps(config, indent=2)
        (folder / CONFIG).write_text(text + "\n", "utf-8")
        tensors = {k: v.detach().contiguous() for k, v in state.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)  # safetensors leaves it readable by its owner only
        if tokenizer_json is not None:
            (folder / TOKENIZER).write_text(tokenizer_json, "utf-8")


def check_state(spec: ModelSpec, state: Mapping[str, Tensor], source: str) -> None:
    """Raise CheckpointError naming the first tensor that is missing, extra, misshapen or not finite."""
    shapes = spec.parameter_shapes()
    for name, shape in shapes.items():
        if name not in state:
            raise CheckpointError(f"{source} lacks tensor {name} {list(shape)} ({spec.label})")
        found = tuple(state[name].shape)
        if found != shape:
            raise CheckpointError(f"{source}: {name} is {list(found)}, expected {list(shape)}")
    if extra := sorted(set(state) - set(shapes)):
        found = tuple(state[extra[0]].shape)
        raise CheckpointError(
            f"{source} has extra tensor {extra[0]} {list(found)}, which {spec.label} does not have"
        )
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{source}: {name} is {tensor.dtype}; weights must be floating point"
            )
        # The sum is finite exactly when every element is (an overflow of float64 aside).
        if not tensor.is_meta and not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise CheckpointError(f"{source}: {name} holds NaN or infinite values")


def build(spec: ModelSpec, state: Mapping[str, Tensor]) -> Decoder:
    """An eval-mode float32 decoder with these weights."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    float32 = {name: tensor.to(torch.float32) for name, tensor in state.items()}
    decoder.load_state_dict(float32, strict=True, assign=True)
    return decoder.eval().requires_grad_(False)


def load_model_dir(folder: Path) -> Decoder:
    """Load a MODEL_DIR; its weights are memory-mapped, then cast to float32."""
    spec, _ = read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a MODEL_DIR: it has no {WEIGHTS}; {MAKE_ONE}")
    try:
        with safe_open(path, framework="pt") as f:
            state = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path} is damaged or cut short: {e}; import it again") from None
    check_state(spec, state, str(path))
    return build(spec, state)


def load_any(path: str | os.PathLike[str]) -> Decoder:
    """A checkpoint file, ``hf:REPO[/FILE]`` or MODEL_DIR as a decoder."""
    text = os.fspath(path)
    if not text.startswith("hf:") and Path(text).is_dir():
        return load_model_dir(Path(text))
    from edgeqkv.importers import read_checkpoint

    imported = read_checkpoint(text)
    return build(imported.spec, imported.state)
