"""``edgeqkv generate``: stream text from any bundle."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from edgeqkv.runner import Runner


def run(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    n: Annotated[int, typer.Option("-n", "--n-gen", min=1, help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest; 0 means all.")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option("-t", "--threads", min=1)] = 1,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="byte|FILE|DIR", help="(default: the bundle's own)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Continue a prompt; text to stdout as it comes, figures to stderr.

    Example: edgeqkv generate OUT/onnx --prompt "In the beginning" -n 40 --temperature 0.8 --top-k 40
    """
    import numpy as np

    from device_bench.sampling import check_sampling
    from edgeqkv.artifact import TOKENIZER, read_artifact
    from edgeqkv.console import note, print_json
    from edgeqkv.errors import BundleError, UnsupportedError, UsageError
    from edgeqkv.runner import load_runner
    from edgeqkv.tokenizer import check_ids, codec_of

    check_sampling(temperature, top_k)
    if prompt != prompt.encode("utf-8", "replace").decode():
        raise UsageError(f"--prompt is {prompt!r}, which is not UTF-8; give it as UTF-8")
    artifact = read_artifact(bundle)
    if not artifact.model.is_causal:
        raise UnsupportedError(
            f"{bundle}: {artifact.model.label} is not causal and continues no text; give a causal one"
        )
    if tokenizer is None and not (bundle / TOKENIZER).is_file():
        raise BundleError(f"{bundle} has no {TOKENIZER}; give --tokenizer byte|FILE|DIR")
    codec = codec_of(bundle, tokenizer)
    ids = codec.encode(prompt).ids
    if not ids:
        raise UsageError(f"--prompt is {prompt!r}, which has no tokens; give at least a word")
    check_ids(ids, artifact.model.used_tokens, bundle, tokenizer)
    if len(ids) + n - 1 > artifact.cache.capacity:
        raise UsageError(
            f"-n is {n}: with {len(ids)} prompt tokens it exceeds the context of "
            f"{artifact.cache.capacity}; lower it, shorten --prompt or export with a larger --max-context"
        )
    runner = load_runner(artifact, bundle, threads=threads)
    try:
        start = time.perf_counter()
        logits = runner.prefill(np.asarray(ids, np.int64))
        first = time.perf_counter()
        stream = _continue(runner, logits, n, temperature, top_k, seed)
        new: list[int] = []
        shown = codec.decode(ids)
        if not as_json:
            print(shown, end="", flush=True)
        for token in stream:
            new.append(token)
            shown = shown if as_json else _print_new(codec, ids + new, shown)
        end = time.perf_counter()
        label = f"{runner.engine}{' (interpreted, speed means nothing)' * runner.interpreted}"
        if as_json:
            text = codec.decode(ids + new)
            print_json({"engine": runner.engine, "prompt_ids": ids, "ids": new, "text": text})
        else:
            print(codec.decode(ids + new)[len(shown) :])
            rate = f"{(n - 1) / (end - first):.1f} tok/s" if n > 1 else "-"
            note(f"{label}: {len(ids)} prompt tokens, TTFT {1e3 * (first - start):.1f} ms, {rate}")
    finally:
        runner.close()


def _continue(
    runner: Runner, logits: object, n: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    import numpy as np

    from device_bench.sampling import sample

    rng = np.random.default_rng(seed)
    used = runner.artifact.model.used_tokens
    row = np.asarray(logits)
    for i in range(n):
        token = sample(row, used, temperature=temperature, top_k=top_k, rng=rng)
        yield token
        if i < n - 1:
            row = runner.decode(token)


def _print_new(codec: Tokenizer, ids: list[int], shown: str) -> str:
    """Print what is new, holding back a character whose bytes have not all come."""
    text: str = codec.decode(ids)
    if text.endswith("\N{REPLACEMENT CHARACTER}"):
        return shown
    sys.stdout.write(text[len(shown) :])
    sys.stdout.flush()
    return text
