"""``edgeqkv eval``: perplexity of a text, and what a bundle lost against its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from edgeqkv.evaluate import Rows, Windows
    from edgeqkv.model import Decoder
    from edgeqkv.runner import Runner

PREFILLS = 32  # positions at which the prefill path is compared with the decode path
STEP = 256  # tokens per step of the progress bar
# How far the mean loss of the two paths may be apart, in nats, by the bundle's coarsest format: about
# seven times the most that was measured (int4 weights, whose kernels for one row and for many add up
# in another order: 7e-4; int8 2e-5; an int8 cache, whose rows are read as stored by both: 3e-7).
AGREEMENT = {"fp32": 1e-4, "fp16": 5e-3, "int8": 5e-3, "int4": 5e-3}


def run(
    source: Annotated[Path, typer.Argument(metavar="BUNDLE|MODEL_DIR")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="UTF-8 text to predict.")],
    tokens: Annotated[
        int, typer.Option(min=1, help="Predictions; the text may end before.")
    ] = 4096,
    reference: Annotated[
        Path | None, typer.Option(metavar="MODEL_DIR", help="Eager model to measure against.")
    ] = None,
    threads: Annotated[int, typer.Option("-t", "--threads", min=1)] = 1,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="byte|FILE|DIR", help="(default: the source's own)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Perplexity over a bundle's cached decode path and over prefill, or of an eager MODEL_DIR.

    Exits with status 4 when the two paths disagree.

    Example: edgeqkv eval OUT/onnx --text held_out.txt --reference MODEL_DIR
    """
    from edgeqkv.console import print_json
    from edgeqkv.corpus import read_text
    from edgeqkv.errors import MismatchError

    is_one = is_bundle(source)
    read_text(text)  # a wrong one is told before anything is loaded
    if is_one:
        from edgeqkv.runner import open_runner

        runner = open_runner(source, threads=threads)
        try:
            data = evaluate_bundle(runner, source, text, tokens, reference, tokenizer)
        finally:
            runner.close()
    else:
        data = evaluate_model(source, text, tokens, reference, tokenizer)
    if as_json:
        print_json(data)
    else:
        _print(data, tokens)
    if (prefill := data["prefill"]) and not prefill["agrees"]:
        raise MismatchError(
            f"{source}: prefill gives perplexity {prefill['perplexity']:.6g} where decode gives "
            f"{prefill['decode_perplexity']:.6g} at the same {prefill['positions']} positions"
        )


def is_bundle(source: Path) -> bool:
    from edgeqkv.artifact import MANIFEST
    from edgeqkv.config import CONFIG
    from edgeqkv.errors import CheckpointError

    if not source.exists():
        raise CheckpointError(f"{source} does not exist; give a bundle or a MODEL_DIR")
    is_one = (source / MANIFEST).is_file()
    if source.is_dir() and not is_one and not (source / CONFIG).is_file():
        raise CheckpointError(
            f"{source} is neither a bundle (no {MANIFEST}) nor a MODEL_DIR (no {CONFIG}); make them "
            "with `edgeqkv export` and `edgeqkv import`"
        )
    return is_one


def evaluate_bundle(
    runner: Runner,
    source: Path,
    text: Path,
    tokens: int,
    reference: Path | None,
    tokenizer: str | None,
) -> dict[str, Any]:
    """What ``--json`` prints, of a loaded bundle."""
    import numpy as np

    from edgeqkv.artifact import MANIFEST, file_entry
    from edgeqkv.console import progress
    from edgeqkv.corpus import encode_file
    from edgeqkv.evaluate import decode_rows, perplexity, prefill_losses, windows

    artifact = runner.artifact
    _check_causal(artifact.model.is_causal, source)
    used = artifact.model.used_tokens
    ids = np.asarray(encode_file(text, source, used, tokenizer), np.int64)
    chunk = windows(ids, runner.capacity, tokens)
    theirs = None if reference is None else _reference(reference, used, runner.capacity)
    data, losses = _score(chunk, decode_rows(runner), used, theirs, reference)
    total = min(PREFILLS, len(chunk.inputs))
    with progress(-(-total // 8), "eval prefill") as step:

        def report(done: int) -> None:
            if done % 8 == 0 or done == total:
                step(f"{done} of {total} positions")

        positions, prefill = prefill_losses(chunk, runner, used, PREFILLS, report)
    decode = losses[positions]
    return {
        "source": str(source),
        "sha256": file_entry(source / MANIFEST).sha256,
        "engine": runner.engine,
        "interpreted": runner.interpreted,
        "weights": artifact.weights,
        "stored_weights": artifact.stored_weights,
        "cache_dtype": artifact.cache.dtype,
        "bytes_per_token": artifact.cache.bytes_per_token,
        **data,
        "prefill": {
            "positions": len(positions),
            "perplexity": perplexity(prefill)[0],
            "decode_perplexity": perplexity(decode)[0],
            "max_difference_nats": float(np.abs(prefill - decode).max()),
            "agrees": abs(float((prefill - decode).mean())) <= AGREEMENT[artifact.numerics],
        },
    }


def evaluate_model(
    source: Path, text: Path, tokens: int, reference: Path | None, tokenizer: str | None
) -> dict[str, Any]:
    """What ``--json`` prints, of an eager model: float32, no cache."""
    import numpy as np

    from edgeqkv.corpus import encode_file
    from edgeqkv.eager import eager_rows
    from edgeqkv.evaluate import windows
    from edgeqkv.model_dir import load_any

    decoder = load_any(source)
    spec = decoder.spec
    _check_causal(spec.is_causal, source)
    context = spec.max_position_embeddings
    ids = np.asarray(encode_file(text, source, spec.used_tokens, tokenizer), np.int64)
    chunk = windows(ids, context, tokens)
    theirs = None if reference is None else _reference(reference, spec.used_tokens, context)
    data, _ = _score(chunk, eager_rows(decoder), spec.used_tokens, theirs, reference)
    about = {"engine": "eager", "interpreted": False, "weights": "fp32", "stored_weights": "fp32"}
    return {
        "source": str(source),
        "sha256": None,
        **about,
        "cache_dtype": None,
        "bytes_per_token": None,
        **data,
        "prefill": None,
    }


def _reference(path: Path, used: int, context: int) -> Rows:
    from edgeqkv.eager import eager_rows
    from edgeqkv.errors import UsageError
    from edgeqkv.model_dir import load_any

    decoder: Decoder = load_any(path)
    spec = decoder.spec
    _check_causal(spec.is_causal, path)
    if spec.used_tokens != used or spec.max_position_embeddings < context:
        raise UsageError(
            f"--reference {path} has {spec.used_tokens} tokens and "
            f"{spec.max_position_embeddings} positions; needed: {used} and at least {context}"
        )
    return eager_rows(decoder)


def _score(
    text: Windows, rows: Rows, used: int, theirs: Rows | None, reference: Path | None
) -> tuple[dict[str, Any], Any]:
    """(figures, loss of every token)."""
    from edgeqkv.console import progress
    from edgeqkv.evaluate import mean_and_stderr, perplexity, relative_change, score

    total = len(text.inputs)
    with progress(-(-total // STEP), "eval") as step:

        def report(done: int) -> None:
            if done % STEP == 0 or done == total:
                step(f"{done} tokens")

        scores = score(text, rows, used, reference=theirs, report=report)
    value, stderr = perplexity(scores.loss)
    data: dict[str, Any] = {
        "context": text.context,
        "tokens": total,
        "loss": mean_and_stderr(scores.loss)[0],
        "perplexity": value,
        "perplexity_stderr": stderr,
        "reference": None,
    }
    if scores.kl is not None and scores.same is not None and scores.reference_loss is not None:
        change, change_stderr = relative_change(scores.loss, scores.reference_loss)
        data["reference"] = {
            "source": str(reference),
            "perplexity": perplexity(scores.reference_loss)[0],
            "perplexity_change": change,
            "perplexity_change_stderr": change_stderr,
            "kl_mean": float(scores.kl.mean()),
            "kl_max": float(scores.kl.max()),
            "top1": float(scores.same.mean()),
        }
    return data, scores.loss


def _check_causal(is_causal: bool, source: Path) -> None:
    from edgeqkv.errors import UnsupportedError

    if not is_causal:
        raise UnsupportedError(
            f"{source} is not causal: it predicts no next token to evaluate; give a causal model"
        )


def _print(data: dict[str, Any], asked: int) -> None:
    from edgeqkv.console import print_table

    def plus_minus(value: float, stderr: float | None, form: str, unit: str = "") -> str:
        """With the 95 % interval of the text's variation."""
        half = "" if stderr is None else f" ± {1.96 * stderr:{form}}"
        return f"{value:{form}}{half}{unit}" + " (95 %)" * bool(half)

    short = "" if data["tokens"] >= asked else f", all there are: --tokens is {asked}"
    rows = [
        ("engine", data["engine"] + " (interpreted)" * data["interpreted"]),
        ("weights, cache", f"{data['stored_weights']}, {data['cache_dtype'] or 'no cache'}"),
        ("tokens", f"{data['tokens']} in windows of {data['context']}{short}"),
        ("perplexity", plus_minus(data["perplexity"], data["perplexity_stderr"], ".4f")),
    ]
    if prefill := data["prefill"]:
        rows.append(
            (
                "prefill and decode",
                f"{prefill['perplexity']:.4f} and {prefill['decode_perplexity']:.4f} at "
                f"{prefill['positions']} positions of the text: the two paths "
                + ("agree" if prefill["agrees"] else "DISAGREE"),
            )
        )
    if reference := data["reference"]:
        change, stderr = reference["perplexity_change"], reference["perplexity_change_stderr"]
        percent = plus_minus(100 * change, stderr and 100 * stderr, ".3f", " %")
        rows += [
            ("reference", f"{reference['perplexity']:.4f} ({reference['source']})"),
            ("change", percent),
            ("KL, mean and max", f"{reference['kl_mean']:.2e}, {reference['kl_max']:.2e} nats"),
            ("top-1 agreement", f"{100 * reference['top1']:.2f} %"),
        ]
    print_table((data["source"], ""), rows)
