"""Golden vectors: what the eager float32 model answers, kept in every bundle."""

from __future__ import annotations

import numpy as np
import torch

from edgeqkv.artifact import Golden
from edgeqkv.errors import SpecError
from edgeqkv.model import Decoder

PROMPT_TOKENS, DECODE_TOKENS = 24, 8


def make_golden(decoder: Decoder, context: int, *, seed: int = 0) -> Golden:
    """Logits of a seeded random prompt and of the tokens fed after it, one by one.

    Random ids on purpose: they exercise the whole vocabulary where a fluent text would not.
    """
    decode = DECODE_TOKENS if decoder.spec.is_causal else 0
    prompt = min(PROMPT_TOKENS, context - decode)
    if prompt < 1:
        raise SpecError(f"max context {context} is too small; allowed: {decode + 1} or more")
    ids = random_ids(decoder, prompt + decode, seed)
    logits = reference_logits(decoder, ids, prompt)
    return Golden(ids[:prompt], logits[0], ids[prompt:], logits[1:])


def random_ids(decoder: Decoder, length: int, seed: int) -> np.ndarray:
    """[length] int64 ids that the tokenizer has."""
    return np.random.default_rng(seed).integers(0, decoder.spec.used_tokens, length, np.int64)


def reference_logits(decoder: Decoder, ids: np.ndarray, prompt: int) -> np.ndarray:
    """[1 + len(ids) - prompt, V] float32: after the prompt, and after each token that follows.

    A non-causal model has one answer: its last token's.
    """
    with torch.inference_mode():
        logits = decoder(torch.from_numpy(ids)[None])[0].numpy()
    return np.ascontiguousarray(logits[prompt - 1 :])
