"""Writes docs/quantisation.md: what every number format costs the trained checkpoints, as measured.

Run ``make quantisation``; rows are kept in docs/quantisation.jsonl, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHECKPOINTS = ROOT / "checkpoints"
ROWS = Path(__file__).with_suffix(".jsonl")
MODELS = ("kjv-qkv", "kjv-q-kv", "kjv-q-gqa2", "kjv-q-mqa")
CALIBRATE = ("--calibrate", str(CHECKPOINTS / "calibration.txt"))
# name -> flags of `edgeqkv export`. Of a cache's formats each is measured with float32 weights, and
# the two that a phone would take together.
WEIGHTS = {
    "fp32": ("--weights", "fp32"),
    "fp16": ("--weights", "fp16"),
    "int8": ("--weights", "int8"),
    "int4 RTN": ("--weights", "int4"),
    "int4 GPTQ": ("--weights", "int4", *CALIBRATE),
}
CACHES = {
    "fp32": ("--cache-dtype", "fp32"),
    "fp16": ("--cache-dtype", "fp16"),
    "int8": ("--cache-dtype", "int8"),
    "int8 rotated": ("--cache-dtype", "int8", "--cache-rotate", *CALIBRATE),
}
CASES = {
    "onnx": (
        *((w, "fp32") for w in WEIGHTS),
        *(("fp32", c) for c in ("fp16", "int8", "int8 rotated")),
        ("int4 GPTQ", "int8 rotated"),
    ),
    "executorch": tuple((w, "fp32") for w in WEIGHTS),
    "coreml": tuple((w, "fp16") for w in WEIGHTS if w != "fp32"),
}
TARGETS = (  # what a row is, the most perplexity may rise (%), which rows
    ("int8 weights", 0.3, lambda r: r["weights"] == "int8"),
    ("int4 weights, groups of 32, GPTQ", 2.0, lambda r: r["weights"] == "int4 GPTQ"),
    ("int8 cache", 0.1, lambda r: r["cache"].startswith("int8") and r["weights"] == "fp32"),
    ("fp16 cache", 0.02, lambda r: r["cache"] == "fp16" and r["backend"] == "onnx"),
)


def edgeqkv(*arguments: object) -> Any:
    """What a command prints with --json.

    Raises:
        RuntimeError: it failed; the message is its last line on stderr.
    """
    command = [sys.executable, "-P", "-c", "from edgeqkv.cli import main; main()"]
    done = subprocess.run(
        [*command, *map(str, arguments), "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout)


def measure(
    out: Path, model: str, backend: str, weights: str, cache: str, tokens: int
) -> dict[str, Any]:
    """One row: export, verify, evaluate on held-out text. A refusal is a row too."""
    flags = (*WEIGHTS[weights], *CACHES[cache])
    text = CHECKPOINTS / "held_out.txt"
    try:
        (made,) = edgeqkv(
            "export", out / model, "-b", backend, "-o", out / "bundle", "--overwrite", *flags
        )
        reference = ("--reference", out / model)
        found = edgeqkv("eval", made["bundle"], "--text", text, "--tokens", tokens, *reference)
    except RuntimeError as e:
        return {"refused": str(e)}
    reference_part = found["reference"]
    return {
        "refused": None,
        "tokens": found["tokens"],
        "engine": found["engine"],
        "perplexity": found["perplexity"],
        "change": reference_part["perplexity_change"],
        "stderr": reference_part["perplexity_change_stderr"],
        "kl": reference_part["kl_mean"],
        "top1": reference_part["top1"],
        "nbytes": made["nbytes"],
        "bytes_per_token": made["bytes_per_token"],
    }


def read_rows() -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()] if ROWS.exists() else []
    )


def rows_of(out: Path, tokens: int) -> list[dict[str, Any]]:
    """Every case, measured now or found in ROWS for the same checkpoint and tokens."""
    known = read_rows()
    rows = []
    for model in MODELS:
        checkpoint = CHECKPOINTS / f"{model}.pt"
        sha256 = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
        imported = False
        for backend, cases in CASES.items():
            for weights, cache in cases:
                key = {
                    "model": model,
                    "sha256": sha256,
                    "backend": backend,
                    "weights": weights,
                    "cache": cache,
                    "asked": tokens,
                }
                row = next((r for r in known if all(r.get(k) == v for k, v in key.items())), None)
                if row is None:
                    if not imported:
                        tokenizer = CHECKPOINTS / "tokenizer.json"
                        edgeqkv(
                            "import", checkpoint, "-o", out / model, "--tokenizer", tokenizer,
                            "--overwrite",
                        )  # fmt: skip
                        imported = True
                    row = {**key, **measure(out, model, backend, weights, cache, tokens)}
                    with ROWS.open("a") as f:
                        f.write(json.dumps(row) + "\n")
                print(f"{model} {backend} {weights} {cache}", file=sys.stderr)
                rows.append(row)
    return rows


def percent(row: dict[str, Any]) -> str:
    return f"{100 * row['change']:+.3f} ± {196 * row['stderr']:.3f}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | weights | cache | perplexity | change % | KL | top-1 % | file kB | bytes/token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        head = f"| {r['model'].removeprefix('kjv-')} | {r['weights']} | {r['cache']} |"
        if r["refused"]:
            lines.append(f"{head} refused: {r['refused'].removeprefix('error: ')} | | | | | |")
        else:
            lines.append(
                f"{head} {r['perplexity']:.3f} | {percent(r)} | {r['kl']:.1e} | "
                f"{100 * r['top1']:.2f} | {r['nbytes'] / 1000:,.0f} | {r['bytes_per_token']:,} |"
            )
    return "\n".join(lines)


def targets(rows: list[dict[str, Any]]) -> str:
    lines = ["| | at most | worst measured | where |", "|---|---|---|---|"]
    for name, most, chosen in TARGETS:
        of = [r for r in rows if not r["refused"] and chosen(r)]
        if not of:
            lines.append(f"| {name} | +{most} % | not measured | |")
            continue
        worst = max(of, key=lambda r: r["change"])
        met = "" if 100 * worst["change"] <= most else " **missed**"
        where = f"{worst['model']}, {worst['backend']}, {worst['weights']}, {worst['cache']}"
        lines.append(f"| {name} | +{most} % | {percent(worst)} %{met} | {where} |")
    return "\n".join(lines)


def document(rows: list[dict[str, Any]]) -> str:
    measured = [r for r in rows if not r["refused"]]
    tokens = max((r["tokens"] for r in measured), default=0)
    text = (Path(__file__).with_suffix(".in.md")).read_text("utf-8")
    parts = {
        "TOKENS": f"{tokens:,}",
        "TARGETS": targets(rows),
        **{
            backend.upper(): table([r for r in rows if r["backend"] == backend])
            for backend in CASES
        },
    }
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "out/quantisation")
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = rows_of(arguments.output, arguments.tokens)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    Path(__file__).with_suffix(".md").write_text(document(rows), "utf-8")


if __name__ == "__main__":
    main()
