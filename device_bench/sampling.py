"""Choose the next token from a row of logits. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeqkv.errors import UsageError


def check_sampling(temperature: float, top_k: int) -> None:
    """Raise UsageError for a temperature below 0 or a top_k below 0."""
    if not 0 <= temperature < 1e6:
        raise UsageError(f"--temperature is {temperature}; allowed: 0 (greedy) or more")
    if top_k < 0:
        raise UsageError(f"--top-k is {top_k}; allowed: 0 (all) or more")


def sample(
    logits: NDArray[np.float32],
    used_tokens: int,
    *,
    temperature: float,
    top_k: int,
    rng: np.random.Generator,
) -> int:
    """A token id below ``used_tokens``: the padding of the vocabulary is never sampled.

    logits [V]. temperature 0 is greedy. top_k 0 keeps all tokens.
    """
    logits = logits[:used_tokens].astype(np.float64)
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        kept = np.argpartition(logits, -top_k)[-top_k:]
    else:
        kept = np.arange(len(logits))
    scaled = logits[kept] / temperature
    p = np.exp(scaled - scaled.max())
    return int(rng.choice(kept, p=p / p.sum()))
