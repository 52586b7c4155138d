"""``edgeqkv verify``: does each bundle compute what the checkpoint computes?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer


def run(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...")],
    reference: Annotated[
        Path | None,
        typer.Option(metavar="MODEL_DIR", help="Eager reference (default: the golden vectors)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare bundles with the eager reference: prefill, decode, after reset and reload.

    Exits with status 4 when a threshold is exceeded.

    Example: edgeqkv verify OUT/onnx OUT/executorch --reference MODEL_DIR
    """
    from edgeqkv.artifact import read_artifact
    from edgeqkv.console import print_json, print_table, progress
    from edgeqkv.errors import MismatchError
    from export.verify import verify_bundle

    for bundle in bundles:  # what is no bundle is told before the others are run
        read_artifact(bundle, check_sha256=False)
    decoder = None
    if reference is not None:
        from edgeqkv.model_dir import load_any

        decoder = load_any(reference)
    results = []
    with progress(len(bundles), "verify", ahead=True) as step:
        for bundle in bundles:
            step(str(bundle))
            results.append(verify_bundle(bundle, decoder=decoder, original=True))
    if as_json:
        print_json([dataclasses.asdict(r) | {"passed": r.passed} for r in results])
    else:
        rows = [
            [
                r.bundle if i == 0 else "",
                c.way,
                c.rows,
                f"{c.max_abs:.1e}",
                f"{c.kl:.1e}",
                f"{c.cosine:.6f}",
                f"{100 * c.top1:.0f} %",
            ]
            for r in results
            for i, c in enumerate(r.comparisons)
        ]
        print_table(["bundle", "way", "rows", "max abs", "KL", "cosine", "top-1"], rows)
        for r in results:
            verdict = "ok" if r.passed else f"FAILED: {r.failure}"
            print(f"{r.bundle}: {verdict} ({r.engine}, against the {r.reference}, {r.numerics})")
    if failed := [r for r in results if not r.passed]:
        raise MismatchError(
            f"{len(failed)} of {len(results)} bundles failed verification: {failed[0].bundle}: "
            f"{failed[0].failure}"
        )
