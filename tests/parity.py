"""The check every runner must pass: prefill, then token by token, against the eager reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeqkv.errors import RunError
from edgeqkv.model import Decoder
from edgeqkv.runner import Runner


def random_ids(decoder: Decoder, length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, decoder.spec.used_tokens, length, dtype=np.int64)


def assert_parity(
    runner: Runner, decoder: Decoder, *, prompt: int = 11, steps: int = 16, atol: float = 1e-3
) -> None:
    """Prefill `prompt` tokens and decode `steps` more; every logit row within `atol` of eager."""
    ids = random_ids(decoder, prompt + steps)
    expected = decoder(torch.from_numpy(ids)[None])[0].numpy()
    runner.reset()
    got = [runner.prefill(ids[:prompt])]
    got += [runner.decode(int(token)) for token in ids[prompt:]]
    assert runner.position == prompt + steps
    np.testing.assert_allclose(np.stack(got), expected[prompt - 1 :], atol=atol, rtol=0)


def assert_closes(runner: Runner) -> None:
    """Once, twice; and whoever goes on using it is told."""
    runner.close()
    runner.close()
    ids = np.array([1])
    for use in (
        runner.reset,
        runner.cache_regions,
        lambda: runner.prefill(ids),
        lambda: runner.decode(1),
    ):
        with pytest.raises(RunError, match="closed; open the bundle again"):
            use()
