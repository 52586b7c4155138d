"""From raw result lines to the rows a person compares: statistics are computed here, on read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from device_bench.result import BenchResult, BytesPerToken, Memory, Snapshot
from device_bench.stats import Summary, percentile, summarize


@dataclasses.dataclass(frozen=True)
class Row:
    """One bundle at one thread count and depth; prefill and decode lines folded together.

    Speeds are medians over repetitions (tok/s), ``*_mad`` their median absolute deviation. Times
    are None when interpreted. ``anon_*``: anonymous memory and swap after each stage, bytes, the
    last two at the end of the prefill and of the decode workload: unlike USS it does not change
    with who else has mapped the same libraries. peak_rss: the larger of the two's.
    """

    name: str
    backend: str
    engine: str | None
    interpreted: bool | None
    variant: str
    layout: str
    dtype: str
    threads: int
    depth: int
    n_prompt: int | None
    n_gen: int | None
    formula: int
    declared: int | None
    measured_cache: float | None
    measured_process: float | None
    process_ci95: tuple[float, float] | None
    over: str | None
    nbytes: int
    load_ms: float | None
    ttft_ms: float | None
    prefill_tok_s: float | None
    prefill_mad: float | None
    decode_tok_s: float | None
    decode_mad: float | None
    tpot_ms: float | None
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    itl_p95_ms: float | None
    itl_p99_ms: float | None
    anon_baseline: int | None
    anon_import: int | None
    anon_load: int | None
    anon_prefill: int | None
    anon_decode: int | None
    peak_rss: int | None
    status: str
    sha256: str


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


def fold(results: Sequence[BenchResult]) -> list[Row]:
    """Rows in the order backend, bytes per token (most first), name, threads, depth."""
    groups: dict[tuple[Any, ...], list[BenchResult]] = {}
    for r in results:
        w = r.workload
        groups.setdefault((r.artifact.sha256, r.device, w.n_threads, w.n_depth), []).append(r)
    caches: dict[str, BytesPerToken] = {}
    for r in results:  # a bundle's figures are on every line that could carry them
        known = caches.get(r.artifact.sha256)
        if known is None or not known.points:
            caches[r.artifact.sha256] = r.cache.bytes_per_token
    rows = [
        _row(group, p, n, caches[group[0].artifact.sha256])
        for group in groups.values()
        for p, n in itertools.zip_longest(
            sorted({r.workload.n_prompt for r in group} - {0}),
            sorted({r.workload.n_gen for r in group} - {0}),
        )
    ]
    return sorted(rows, key=lambda r: (r.backend, -r.formula, r.name, r.sha256, r.threads, r.depth))


def _row(
    group: Sequence[BenchResult], prompt: int | None, gen: int | None, cache: BytesPerToken
) -> Row:
    first = group[0]
    ran = [r for r in group if r.samples is not None]
    shown = next((r for r in ran), first)
    timed = [] if shown.artifact.interpreted else ran
    prefill = [r for r in timed if r.workload.n_prompt and r.workload.n_prompt == prompt]
    decode = [r for r in timed if r.workload.n_gen and r.workload.n_gen == gen]
    ttft = [rep[0] for r in prefill for rep in _repetitions(r)]
    gaps = [[b - a for a, b in itertools.pairwise(rep)] for r in decode for rep in _repetitions(r)]
    tpot = [sum(g) / len(g) for g in gaps if g]
    itl = [gap / 1e6 for g in gaps for gap in g]
    rate = summarize([1e9 * (prompt or 0) / t for t in ttft])
    speed = summarize([1e9 / t for t in tpot])
    prefill_memory = next((r.memory for r in prefill if r.memory), None)
    decode_memory = next((r.memory for r in decode if r.memory), None)
    peaks = [r.memory.peak_rss for r in (*prefill, *decode) if r.memory is not None]
    return Row(
        name=first.artifact.name,
        backend=first.artifact.backend,
        engine=shown.artifact.engine,
        interpreted=shown.artifact.interpreted,
        variant=first.model.label,
        layout=first.cache.layout,
        dtype=first.cache.dtype,
        threads=first.workload.n_threads,
        depth=first.workload.n_depth,
        n_prompt=prompt,
        n_gen=gen,
        formula=cache.formula,
        declared=cache.declared,
        measured_cache=cache.measured_cache,
        measured_process=cache.measured_process,
        process_ci95=cache.ci95.measured_process,
        over=cache.over,
        nbytes=first.artifact.nbytes,
        load_ms=_ms(summarize([r.samples.load_ns for r in timed if r.samples])),
        ttft_ms=_ms(summarize(ttft)),
        prefill_tok_s=rate.median if rate else None,
        prefill_mad=rate.mad if rate else None,
        decode_tok_s=speed.median if speed else None,
        decode_mad=speed.mad if speed else None,
        tpot_ms=_ms(summarize(tpot)),
        itl_p50_ms=percentile(itl, 50),
        itl_p90_ms=percentile(itl, 90),
        itl_p95_ms=percentile(itl, 95),
        itl_p99_ms=percentile(itl, 99),
        anon_baseline=_anon(prefill_memory or decode_memory, "baseline"),
        anon_import=_anon(prefill_memory or decode_memory, "after_import"),
        anon_load=_anon(prefill_memory or decode_memory, "after_load"),
        anon_prefill=_anon(prefill_memory, "after_prefill"),
        anon_decode=_anon(decode_memory, "after_decode"),
        peak_rss=max(peaks, default=None),
        status=_worst(r.status for r in group),
        sha256=first.artifact.sha256,
    )


def _repetitions(result: BenchResult) -> tuple[tuple[int, ...], ...]:
    return result.samples.repetitions if result.samples else ()


def _anon(memory: Memory | None, stage: str) -> int | None:
    found: Snapshot | None = getattr(memory, stage, None)
    return found.anonymous + found.swap if found else None


def _ms(summary: Summary | None) -> float | None:
    return summary.median / 1e6 if summary else None


def _worst(statuses: Iterable[str]) -> str:
    return max(statuses, key=("ok", "invalid", "failed").index)


def one_per_bundle(rows: Sequence[Row]) -> list[Row]:
    """The row of each bundle with the fewest threads and the least depth."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.sha256, row)
    return list(first.values())


def ratios(rows: Sequence[Row], results: Sequence[BenchResult]) -> list[Ratio]:
    """Shared against separate of the same model; then each variant against QKV of its size."""
    specs = {r.artifact.sha256: r.model.spec for r in results}
    found = []
    bundles = [r for r in one_per_bundle(rows) if not r.interpreted]
    for row, other in itertools.permutations(bundles, 2):
        if row.backend != other.backend or row.dtype != other.dtype or other.layout != "separate":
            continue
        mine, theirs = specs[row.sha256], specs[other.sha256]
        if row.layout == "shared" and mine == theirs and row.name == other.name:
            against = "separate, same weights"
        elif other.variant == "QKV" != row.variant and _size(mine) == _size(theirs):
            against = "QKV"
        else:
            continue
        found.append(_ratio(row, other, against))
    return sorted(found, key=lambda r: (r.backend, r.against != "QKV", r.formula or 0))


def _size(spec: Any) -> tuple[int, ...]:
    return (spec.hidden_size, spec.num_hidden_layers, spec.num_attention_heads, spec.vocab_size)


def _ratio(row: Row, other: Row, against: str) -> Ratio:
    def over(field: str) -> float | None:
        a, b = getattr(row, field), getattr(other, field)
        return a / b if a is not None and b else None

    fields = ("formula", "declared", "measured_cache", "peak_rss", "decode_tok_s")
    return Ratio(row.backend, f"{row.variant} {row.layout}", against, *map(over, fields))
