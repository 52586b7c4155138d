"""``config.json`` of a MODEL_DIR. No torch here, so ``inspect`` can read a model without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgeqkv.errors import CheckpointError, SpecError
from edgeqkv.spec import ModelSpec

CONFIG = "config.json"
MODEL_TYPE = "edgeqkv"
MAKE_ONE = "give a MODEL_DIR, which `edgeqkv import SRC -o MODEL_DIR` writes"
# Keys of config.json beside ModelSpec's: Hugging Face's discriminator and where the model came from.
_OWN_KEYS = ("model_type", "architectures", "provenance")


def read_config(folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """(spec, provenance) of a MODEL_DIR, without touching its weights.

    Raises:
        CheckpointError: no config.json, not JSON, another model type, or a field out of range.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is not a MODEL_DIR: it is a file; {MAKE_ONE}") from None
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a MODEL_DIR: it has no {CONFIG}; {MAKE_ONE}"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}; {MAKE_ONE}") from None
    if not isinstance(config, dict) or config.get("model_type") != MODEL_TYPE:
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(
            f"{path}: model_type is {found!r}, expected {MODEL_TYPE!r}; "
            "convert other checkpoints with `edgeqkv import SRC -o MODEL_DIR`"
        )
    fields = {k: v for k, v in config.items() if k not in _OWN_KEYS}
    try:
        spec, provenance = ModelSpec.from_dict(fields), dict(config.get("provenance") or {})
        if not isinstance(provenance.get("inferences", []), list):
            raise SpecError("provenance's inferences must be a list")
        return spec, provenance
    except (SpecError, TypeError, ValueError) as e:
        raise CheckpointError(f"{path}: {e}; correct it, or import the model again") from None
