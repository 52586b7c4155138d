"""What ``edgeqkv eval --json`` found out about a bundle, put beside what ``bench`` measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_bench.result import BenchResult
from edgeqkv.errors import SpecError

KEYS = ("perplexity", "perplexity_stderr", "tokens", "context", "reference")


def read_quality(path: Path) -> Mapping[str, Any] | None:
    """The evaluation in ``path``; None where it holds something else, such as results.

    Raises:
        SpecError: an evaluation of a model, not of a bundle, or one without a perplexity.
    """
    if path.exists() and not path.is_file():  # a pipe would wait forever
        raise SpecError(f"{path} is no file; give the RESULTS.jsonl that `edgeqkv bench -o` wrote")
    try:
        data = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(data, dict) or "schema_version" in data or "perplexity" not in data:
        return None
    if not isinstance(data.get("sha256"), str):
        raise SpecError(f"{path} evaluates no bundle; give `edgeqkv eval BUNDLE --json`")
    numbers = [data["perplexity"], data.get("perplexity_stderr") or 0.0]
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
        raise SpecError(f"{path}: perplexity is {data['perplexity']!r}; it must be a number")
    return data


def attach_quality(
    results: Sequence[BenchResult], found: Mapping[Path, Mapping[str, Any]]
) -> tuple[list[BenchResult], list[str]]:
    """(results with the quality of their bundle, a line for each evaluation that fits none)."""
    by_bundle = {e["sha256"]: {k: e.get(k) for k in KEYS} for e in found.values()}
    bundles = {r.artifact.sha256 for r in results}
    lost = [
        f"{path} evaluates a bundle that is not among the results"
        for path, e in found.items()
        if e["sha256"] not in bundles
    ]
    joined = [
        dataclasses.replace(r, quality=by_bundle.get(r.artifact.sha256, r.quality)) for r in results
    ]
    return joined, lost
