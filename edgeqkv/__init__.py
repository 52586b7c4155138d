"""edgeqkv: on-device deployment of transformers that need one cache tensor per layer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgeqkv.model import Decoder

__version__ = "0.1.0"


def load(path: str | os.PathLike[str]) -> Decoder:
    """Load a checkpoint file or a MODEL_DIR as an eval-mode torch module with ``.spec``.

    ``model(input_ids)`` with input_ids [B, S] int64 gives logits [B, S, vocab_size] float32.

    Raises:
        CheckpointError: the file is damaged, hostile, ambiguous or of a wrong shape.
    """
    from edgeqkv.model_dir import load_any

    return load_any(path)
