"""``edgeqkv audit``: is a bundle what its manifest claims?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Read the artifact itself: its cache tensors, bytes per token, cache copies, duplicates.

    Exits with status 4 when the artifact contradicts its manifest.

    Example: edgeqkv audit OUT/onnx
    """
    from edgeqkv.console import print_json, print_table
    from edgeqkv.errors import MismatchError
    from export.audit import Audit, audit_bundle

    def per_layer(audit: Audit) -> float:
        """Cache tensors of a layer, the scales of an int8 cache left out."""
        tensors = sum(t.role != "scale" for t in audit.facts.cache_tensors)
        return round(tensors / audit.artifact.cache.num_layers, 2)

    results = [audit_bundle(bundle) for bundle in bundles]
    if as_json:
        print_json([r.to_dict() for r in results])
    else:
        rows = [
            [
                r.bundle,
                r.artifact.cache.layout,
                per_layer(r),
                r.artifact.cache.bytes_per_token,
                r.facts.bytes_per_token,
                len(r.facts.cache_copies),
                f"{r.facts.weight_bytes / 1e6:.2f}",
                f"{r.facts.duplicate_weight_bytes / 1e6:.2f}",
            ]
            for r in results
        ]
        columns = ["bundle", "layout", "cache\n/layer", "bytes/token\nformula", "\ndeclared"]
        print_table([*columns, "cache\ncopies", "weights\nMB", "stored\ntwice"], rows)
        for r in results:
            for problem in r.problems:
                print(f"{r.bundle}: PROBLEM: {problem}")
            for warning in r.facts.warnings:
                print(f"{r.bundle}: warning: {warning}")
    if failed := [r for r in results if r.problems]:
        raise MismatchError(
            f"{len(failed)} of {len(results)} bundles are not what their manifest claims: "
            f"{failed[0].bundle}: {failed[0].problems[0]}"
        )
