"""The bundles of a sweep against each other: shared against separate, a variant against QKV."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from device_bench.figures import Row, one_per_bundle, unusual
from device_bench.result import BenchResult
from device_bench.stats import ratio_interval
from edgeqkv.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A bundle against another of the same backend; below 1 is less. None: not measured."""

    backend: str
    what: str
    against: str
    formula: float | None
    declared: float | None
    measured_cache: float | None
    peak_rss: float | None
    decode_tok_s: float | None
    decode_ci95: tuple[float, float] | None


_SAME = ("backend", "dtype", "device", "driver")


def ratios(rows: Sequence[Row], results: Sequence[BenchResult]) -> list[Ratio]:
    """Shared against separate of the same model; then each variant against QKV of its size."""
    specs = {r.artifact.sha256: r.model.spec for r in results}
    found = []
    bundles = [r for r in one_per_bundle(rows) if not r.interpreted]
    for row, other in itertools.permutations(bundles, 2):
        alike = all(getattr(row, f) == getattr(other, f) for f in _SAME)
        if not alike or row.weights != other.weights or other.layout != "separate":
            continue
        mine, theirs = specs[row.sha256], specs[other.sha256]
        if row.layout == "shared" and mine == theirs and row.name == other.name:
            against = "separate, same weights"
        elif other.variant == "QKV" != row.variant and model_size(mine) == model_size(theirs):
            against = "QKV"
        else:
            continue
        found.append(_ratio(row, other, against))
    return sorted(found, key=lambda r: (r.backend, r.against != "QKV", r.formula or 0))


def model_size(spec: ModelSpec) -> tuple[int, ...]:
    """What two models have alike that can be set against each other."""
    return (spec.hidden_size, spec.num_hidden_layers, spec.num_attention_heads, spec.vocab_size)


def _ratio(row: Row, other: Row, against: str) -> Ratio:
    def over(field: str) -> float | None:
        a, b = getattr(row, field), getattr(other, field)
        return a / b if a is not None and b else None

    return Ratio(
        backend=row.backend,
        what=f"{row.variant} {row.layout}{unusual(row.weights, row.dtype, row.layout)}",
        against=against,
        formula=over("formula"),
        declared=over("declared"),
        measured_cache=over("measured_cache"),
        peak_rss=over("peak_rss"),
        decode_tok_s=over("decode_tok_s"),
        decode_ci95=ratio_interval(row.decode_by_process, other.decode_by_process),
    )
