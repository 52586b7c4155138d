"""Perplexity of a text and the distance from a reference model. numpy only, no torch here.

A text is read in consecutive windows of the context, each from an empty cache, so a token sees
between 0 and context - 1 tokens before its predecessor; ``edgeqkv train`` reports the same.
Probabilities are over the ids that the tokenizer has (``ModelSpec.used_tokens``): the padding of the
vocabulary is never sampled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from edgeqkv.errors import TextError
from edgeqkv.runner import Runner

# Token losses are correlated; means of blocks this long are taken as independent of each other.
BLOCK = 64
# window ids [S] -> S rows of logits [vocab_size], row i after ids[: i + 1].
Rows = Callable[[NDArray[np.int64]], Iterator[NDArray[np.float32]]]


@dataclasses.dataclass(frozen=True)
class Windows:
    """inputs and targets [total]; a window begins at every multiple of ``context``."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    context: int

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, len(self.inputs), self.context):
            yield slice(start, min(start + self.context, len(self.inputs)))


@dataclasses.dataclass(frozen=True)
class Scores:
    """Per predicted token, float64 [total]; kl and same are None without a reference.

    loss: nats. kl: KL(reference || model) in nats. same: whether both argmax agree.
    """

    loss: NDArray[np.float64]
    reference_loss: NDArray[np.float64] | None = None
    kl: NDArray[np.float64] | None = None
    same: NDArray[np.bool_] | None = None


def windows(ids: NDArray[np.int64], context: int, tokens: int | None = None) -> Windows:
    """The first ``tokens`` predictions (None: all) of a text.

    Raises:
        TextError: the text has fewer than two tokens.
    """
    if len(ids) < 2:
        raise TextError(f"the text has {len(ids)} tokens, needed: 2; give a longer one")
    ids = ids[: None if tokens is None else tokens + 1]
    return Windows(ids[:-1], ids[1:], context)


def score(
    text: Windows,
    rows: Rows,
    used: int,
    *,
    reference: Rows | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> Scores:
    """Run a model, and a reference beside it, over every window.

    ``report`` hears the number of tokens done, at the end of every BLOCK and at the end.
    """
    total = len(text.inputs)
    loss, expected, kl = np.zeros(total), np.zeros(total), np.zeros(total)
    same = np.zeros(total, np.bool_)
    for window in text:
        ids = text.inputs[window]
        theirs = None if reference is None else reference(ids)
        for at, row in enumerate(rows(ids), window.start):
            ours = log_softmax(row[:used])
            loss[at] = -ours[text.targets[at]]
            if theirs is not None:
                wanted = log_softmax(next(theirs)[:used])
                expected[at] = -wanted[text.targets[at]]
                kl[at] = max(0.0, float(np.exp(wanted) @ (wanted - ours)))
                same[at] = wanted.argmax() == ours.argmax()
            if (at + 1) % BLOCK == 0 or at + 1 == total:
                report(at + 1)
    return Scores(loss) if reference is None else Scores(loss, expected, kl, same)


def decode_rows(runner: Runner) -> Rows:
    """The bundle's own cached path: every token fed by itself from an empty cache."""

    def rows(ids: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
        runner.reset()
        for token in ids:
            yield runner.decode(int(token))

    return rows


def prefill_losses(
    text: Windows,
    runner: Runner,
    used: int,
    count: int,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(positions, losses) of ``count`` predictions spread over the text, each by one prefill.

    ``report`` hears how many are done.
    """
    positions = np.unique(np.linspace(0, len(text.inputs) - 1, count).astype(np.int64))
    losses = np.zeros(len(positions))
    for i, at in enumerate(positions):
        start = at - at % text.context
        runner.reset()
        row = runner.prefill(text.inputs[start : at + 1])
        losses[i] = -log_softmax(row[:used])[text.targets[at]]
        report(i + 1)
    return positions, losses


def log_softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    x = row.astype(np.float64)
    x -= x.max()
    out: NDArray[np.float64] = x - math.log(np.exp(x).sum())
    return out


def mean_and_stderr(values: NDArray[np.float64]) -> tuple[float, float | None]:
    """Mean, and its standard error from the means of blocks; None with fewer than two blocks."""
    blocks = len(values) // BLOCK
    if blocks < 2:
        return float(values.mean()), None
    means = values[: blocks * BLOCK].reshape(blocks, BLOCK).mean(1)
    return float(values.mean()), float(means.std(ddof=1) / math.sqrt(blocks))


def perplexity(losses: NDArray[np.float64]) -> tuple[float, float | None]:
    """exp(mean loss) and its standard error (first order: perplexity * stderr of the loss)."""
    mean, stderr = mean_and_stderr(losses)
    value = math.exp(min(mean, 700.0))
    return value, None if stderr is None else value * stderr


def relative_change(
    losses: NDArray[np.float64], reference: NDArray[np.float64]
) -> tuple[float, float | None]:
    """perplexity / reference's - 1 and its standard error, from the losses token by token.

    Pairing them takes out what makes a text hard for both, so that a change of 0.1 % shows in a few
    thousand tokens whose perplexity itself is known to 5 %.
    """
    mean, stderr = mean_and_stderr(losses - reference)
    ratio = math.exp(min(mean, 700.0))
    return ratio - 1, None if stderr is None else ratio * stderr
