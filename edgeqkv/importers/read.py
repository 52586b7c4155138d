"""Open a PyTorch checkpoint that nobody vouches for: mapped, not copied, and never executed."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgeqkv.errors import CheckpointError, first_line

_ZIP = b"PK\x03\x04"  # what torch.save has written since 1.6; only these can be memory-mapped
# DistributedDataParallel and torch.compile put these in front of names, in any order and depth.
_WRAPPERS = {"module", "_orig_mod"}


def open_checkpoint(path: Path) -> Mapping[str, Any]:
    """The dict that ``torch.save`` wrote. Tensors stay on disk until they are read.

    ``weights_only=True``: a pickle that names anything but tensors and plain data is refused
    before any of it runs.

    Raises:
        CheckpointError: not a file, not a PyTorch checkpoint, damaged, or it tries to run code.
    """
    if not path.is_file():
        found = "is no file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {found}; give a checkpoint file, a Hugging Face folder or hf:REPO[/FILE]"
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: a bare .safetensors file does not say which model it is; allowed: a MODEL_DIR, "
            "or a .pt checkpoint with its config"
        )
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}; copy it again") from None
    if not magic:
        raise CheckpointError(f"{path} is empty; copy or download it again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=magic == _ZIP)
    except pickle.UnpicklingError as e:
        raise CheckpointError(f"{path} {_refusal(str(e))}") from None
    except Exception as e:  # torch raises a dozen types for bytes it cannot parse
        first = first_line(e).split(". ")[0][:100]
        size = f"{path.stat().st_size:,} bytes"
        if magic == _ZIP:
            message = f"{path} is damaged or cut short ({size}; {first}); copy or download it again"
        else:
            message = f"{path} is not a PyTorch checkpoint ({size}); give what torch.save wrote"
        raise CheckpointError(message) from None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}, expected a dict; save weights and config in one"
        )
    return found


def _refusal(message: str) -> str:
    if name := re.search(r"GLOBAL (\S+)", message):
        return (
            f"wants to run {name[1]} while loading; refused, nothing was executed. Only tensors and "
            "plain numbers, strings, lists and dicts are read; save it with nothing else"
        )
    return (
        "is not a PyTorch checkpoint, or is damaged; give what torch.save wrote, or copy it again"
    )


def weights(state: Any, where: str) -> dict[str, Tensor]:
    """The state dict with wrapper prefixes stripped.

    Raises:
        CheckpointError: not a dict of dense CPU tensors, or two names that become one.
    """
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(
            f"{where}: the weights are {'empty' if state == {} else type(state).__name__}; "
            "expected a dict of tensors; save model.state_dict()"
        )
    stripped: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{where}: {key!r} is {type(tensor).__name__}, expected tensors under names; save "
                "model.state_dict()"
            )
        # A stride of 0 makes a few bytes claim to be terabytes; a meta tensor has no bytes at all.
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not dense or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{where}: {key} {list(tensor.shape)} is not a plain dense tensor; save "
                "tensor.cpu().contiguous()"
            )
        name = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
        if name in stripped:
            raise CheckpointError(
                f"{where} holds {name} twice, with and without a wrapper's prefix; save one of them"
            )
        stripped[name] = tensor
    return stripped
