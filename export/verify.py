"""Does a bundle compute what the checkpoint computes? Run it every way an app would."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeqkv.artifact import read_golden
from edgeqkv.errors import BundleError, RunError, UsageError
from edgeqkv.limits import THRESHOLDS
from edgeqkv.model import Decoder
from edgeqkv.runner import Runner, open_runner

# Against the model before it was rounded: what quantisation costs, not whether lowering is right.
QUALITY = THRESHOLDS | {
    "int8": {"max_abs": 0.5, "kl": 2e-2, "cosine": 0.98},
    "int4": {"max_abs": 3.0, "kl": 1.0, "cosine": 0.7},
}
REFERENCE_TOKENS = 96  # compared when the model itself is at hand, and the context has room


class Reference(NamedTuple):
    """What a model answers: ids [N] int64, of which the first ``prompt`` are prefilled, and logits
    [1 + N - prompt, V] float32 after the prompt and after each token that follows."""

    ids: NDArray[np.int64]
    prompt: int
    logits: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One way of running against the reference. top1: share of rows whose argmax agrees."""

    way: str
    rows: int
    max_abs: float
    max_abs_in_std: float
    kl: float
    cosine: float
    top1: float


@dataclasses.dataclass(frozen=True)
class Verification:
    bundle: str
    backend: str
    engine: str
    interpreted: bool
    reference: str
    numerics: str
    comparisons: tuple[Comparison, ...]
    failure: str | None

    @property
    def passed(self) -> bool:
        return self.failure is None


def verify_bundle(
    bundle: Path,
    *,
    decoder: Decoder | None = None,
    original: bool = False,
    reference: Reference | None = None,
) -> Verification:
    """Compare a bundle with the eager model, at hand or by its ``reference``, else with its golden
    vectors.

    ``original``: the decoder has the checkpoint's weights, not the rounded ones; QUALITY applies.

    Raises:
        BundleError: a file is missing or altered. UsageError: a model of another size. A mismatch is a result, not an exception.
    """
    runner = open_runner(bundle)
    artifact = runner.artifact
    if decoder is not None:
        theirs, ours = decoder.spec, artifact.model
        short = theirs.max_position_embeddings < artifact.cache.capacity
        if theirs.vocab_size != ours.vocab_size or theirs.is_causal != ours.is_causal or short:
            raise UsageError(
                f"--reference is {theirs.label} of {theirs.vocab_size} tokens and "
                f"{theirs.max_position_embeddings} positions, {bundle} {ours.label} of "
                f"{ours.vocab_size} and {artifact.cache.capacity}; give the model it was exported from"
            )
        reference = make_reference(decoder, artifact.cache.capacity)
    ids, prompt, expected = reference or _golden(bundle)
    used = artifact.model.used_tokens
    limits = (QUALITY if original else THRESHOLDS)[artifact.numerics]
    rounded = bool(artifact.quantisation.recipe.rules)
    model = "unquantised model" if original and rounded else "eager model"
    comparisons = []

    def compare(way: str, got: list[NDArray[np.float32]], rows: NDArray[np.float32]) -> None:
        comparisons.append(compare_logits(way, np.stack(got)[:, :used], rows[:, :used]))

    try:
        compare("prefill", [runner.prefill(ids[:prompt])], expected[:1])
        if artifact.model.is_causal:
            rest = [runner.decode(int(t)) for t in ids[prompt:]]
            compare("prefill, then token by token", rest, expected[1:])
            runner.reset()
            compare("token by token, after reset", _one_by_one(runner, ids, prompt), expected)
        else:
            runner.reset()
            compare("after reset", [runner.prefill(ids[:prompt])], expected[:1])
    except RunError as e:
        raise BundleError(f"{bundle} cannot be run on its reference: {e}") from None
    finally:
        runner.close()
    again = open_runner(bundle)
    try:
        compare("prefill, after reload", [again.prefill(ids[:prompt])], expected[:1])
    finally:
        again.close()
    return Verification(
        bundle=str(bundle),
        backend=artifact.backend,
        engine=runner.engine,
        interpreted=runner.interpreted,
        reference="golden vectors" if reference is None else model,
        numerics=artifact.numerics,
        comparisons=tuple(comparisons),
        failure=_failure(comparisons, limits),
    )


def make_reference(decoder: Decoder, context: int) -> Reference:
    """Of the eager model, for bundles with at least ``context`` tokens of capacity."""
    from export.golden import random_ids, reference_logits

    length = min(REFERENCE_TOKENS, context)
    ids = random_ids(decoder, length, seed=1)
    prompt = max(1, length * 3 // 4) if decoder.spec.is_causal else length
    return Reference(ids, prompt, reference_logits(decoder, ids, prompt))


def _golden(bundle: Path) -> Reference:
    golden = read_golden(bundle)
    return Reference(
        np.concatenate([golden.prompt_ids, golden.decode_ids]),
        len(golden.prompt_ids),
        np.vstack([golden.prefill_logits, golden.decode_logits]),
    )


def _one_by_one(runner: Runner, ids: NDArray[np.int64], prompt: int) -> list[NDArray[np.float32]]:
    return [runner.decode(int(t)) for t in ids][prompt - 1 :]


def compare_logits(way: str, got: NDArray[np.float32], expected: NDArray[np.float32]) -> Comparison:
    """Both [rows, V]. A NaN in either makes every figure infinitely bad rather than unnoticed."""
    got64, want = got.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(got64).all() and np.isfinite(want).all()):
        return Comparison(way, len(want), np.inf, np.inf, np.inf, -1.0, 0.0)
    difference = float(np.abs(got64 - want).max())
    logp, logq = _log_softmax(want), _log_softmax(got64)
    kl = float((np.exp(logp) * (logp - logq)).sum(-1).max())
    norms = np.linalg.norm(want, axis=-1) * np.linalg.norm(got64, axis=-1)
    cosine = float(((want * got64).sum(-1) / np.maximum(norms, 1e-30)).min())
    top1 = float((want.argmax(-1) == got64.argmax(-1)).mean())
    in_std = difference / max(float(want.std()), 1e-30)
    return Comparison(way, len(want), difference, in_std, max(kl, 0.0), cosine, top1)


def _log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = x - x.max(-1, keepdims=True)
    out: NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return out


def _failure(comparisons: list[Comparison], limits: dict[str, float]) -> str | None:
    for c in comparisons:
        if c.max_abs_in_std > limits["max_abs"]:
            return (
                f"{c.way}: logits differ by {c.max_abs_in_std:.2g} standard deviations; "
                f"allowed: {limits['max_abs']:g}"
            )
        if c.kl > limits["kl"]:
            return f"{c.way}: KL divergence is {c.kl:.2g} nats; allowed: {limits['kl']:g}"
        if c.cosine < limits["cosine"]:
            return f"{c.way}: cosine similarity is {c.cosine:.6f}; allowed: {limits['cosine']}"
    return None
