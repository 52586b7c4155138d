"""From raw result lines to the rows a person compares: statistics are computed here, on read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from device_bench.bandwidth import limit
from device_bench.conditions import Bandwidth, Device
from device_bench.result import BenchResult, BytesPerToken, Memory, Snapshot
from device_bench.stats import percentile, process_interval


@dataclasses.dataclass(frozen=True)
class Row:
    """One bundle on one device at one thread count and depth; prefill and decode folded together.

    Times and speeds (tok/s) are medians over processes of each process's median over repetitions;
    ``*_by_process`` are those medians, ``*_ci95`` their 95 % interval. Times are None when
    interpreted. depth: tokens in the context before the prompt; decode_depth: before the first decoded
    token, deeper where a test is both (``-pg``). driver: what drives the runtime, python, native or page. step_bytes: what a decode step has to read, weights and the cache as it is halfway
    through the workload; limit_tok_s: the speed at which reading that alone fills the step, at the
    bandwidth measured for as many threads and bytes; limit_share: decode speed over it. ``anon_*``: anonymous memory and swap after each stage, bytes, the
    last two at the end of the prefill and of the decode workload: unlike USS it does not change
    with who else has mapped the same libraries. peak_rss: the larger of the two's.
    """

    name: str
    backend: str
    engine: str | None
    driver: str
    interpreted: bool | None
    variant: str
    layout: str
    dtype: str
    weights: str
    formulation: str
    device: str
    kind: str
    emulated: bool
    threads: int
    depth: int
    decode_depth: int
    n_prompt: int | None
    n_gen: int | None
    formula: int
    declared: int | None
    measured_cache: float | None
    measured_process: float | None
    cache_ci95: tuple[float, float] | None
    process_ci95: tuple[float, float] | None
    over: str | None
    nbytes: int
    load_ms: float | None
    cold_ms: float | None
    ttft_ms: float | None
    prefill_tok_s: float | None
    prefill_ci95: tuple[float, float] | None
    prefill_by_process: tuple[float, ...]
    decode_tok_s: float | None
    decode_ci95: tuple[float, float] | None
    decode_by_process: tuple[float, ...]
    step_bytes: int | None
    limit_tok_s: float | None
    limit_share: float | None
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
    perplexity: float | None
    perplexity_stderr: float | None
    unstable: str | None
    status: str
    sha256: str


Test = tuple[int, int]  # n_prompt, n_gen


def fold(results: Sequence[BenchResult]) -> list[Row]:
    """Rows in the order backend, bytes per token (most first), name, threads, depth."""
    groups: dict[tuple[Any, ...], list[BenchResult]] = {}
    for r in results:
        w = r.workload
        groups.setdefault((*_where(r), w.n_threads, w.n_depth), []).append(r)
    devices = {r.device for r in results}
    bandwidth = {d: read_bandwidth([r for r in results if r.device == d]) for d in devices}
    caches: dict[tuple[Any, ...], BytesPerToken] = {}
    for r in results:  # a bundle's figures are on every line of its device that could carry them
        known = caches.get(_where(r))
        if known is None or not known.points:
            caches[_where(r)] = r.cache.bytes_per_token
    rows = [
        _row(group, p, n, caches[_where(group[0])], bandwidth[group[0].device])
        for group in groups.values()
        for p, n in _tests(group)
    ]
    return sorted(rows, key=lambda r: (r.backend, -r.formula, r.name, r.sha256, r.threads, r.depth))


def _tests(group: Sequence[BenchResult]) -> list[tuple[Test | None, Test | None]]:
    """For each row, (n_prompt, n_gen) of the lines its prefill and its decode come from: ``pp`` and
    ``tg`` side by side, and each ``-pg`` by itself, whose decode starts deeper."""
    ran = sorted({(r.workload.n_prompt, r.workload.n_gen) for r in group})
    apart = itertools.zip_longest(
        [test for test in ran if not test[1]], [test for test in ran if not test[0]]
    )
    return [*apart, *((test, test) for test in ran if all(test))]


def _where(result: BenchResult) -> tuple[Any, ...]:
    """The bundle, and what ran it: nothing measured there is said of another device."""
    return (result.artifact.sha256, result.device, result.conditions.engine)


def _row(
    group: Sequence[BenchResult],
    prefilled: Test | None,
    decoded: Test | None,
    cache: BytesPerToken,
    bandwidth: Sequence[Bandwidth],
) -> Row:
    first = group[0]
    ran = [r for r in group if r.samples is not None]
    shown = next((r for r in ran), first)
    timed = [] if shown.artifact.interpreted or first.device.emulated else ran
    prefill = [r for r in timed if (r.workload.n_prompt, r.workload.n_gen) == prefilled]
    decode = [r for r in timed if (r.workload.n_prompt, r.workload.n_gen) == decoded]
    prompt = prefilled[0] if prefilled else None
    gen = decoded[1] if decoded else None
    ttft = [found for r in prefill if (found := percentile(ttft_ns(r), 50))]
    tpot = [found for r in decode if (found := percentile(tpot_ns(r), 50))]
    itl = [gap / 1e6 for r in decode for gap in itl_ns(r)]
    rate = tuple(1e9 * (prompt or 0) / t for t in ttft)
    speed = tuple(1e9 / t for t in tpot)
    step, bound = _limit(decode, cache, bandwidth)
    quality = next((r.quality for r in group if r.quality), {})
    prefill_memory = next((r.memory for r in prefill if r.memory), None)
    decode_memory = next((r.memory for r in decode if r.memory), None)
    peaks = [r.memory.peak_rss for r in (*prefill, *decode) if r.memory is not None]
    return Row(
        name=first.artifact.name,
        backend=first.artifact.backend,
        engine=shown.artifact.engine,
        driver=shown.conditions.engine,
        interpreted=shown.artifact.interpreted,
        variant=first.model.label,
        layout=first.cache.layout,
        dtype=first.cache.dtype,
        weights=first.artifact.stored_weights,
        formulation=first.artifact.formulation,
        device=device_label(first.device),
        kind=first.device.kind,
        emulated=first.device.emulated,
        threads=first.workload.n_threads,
        depth=first.workload.n_depth,
        decode_depth=first.workload.n_depth + (decoded[0] if decoded else 0),
        n_prompt=prompt,
        n_gen=gen,
        formula=cache.formula,
        declared=cache.declared,
        measured_cache=cache.measured_cache,
        measured_process=cache.measured_process,
        cache_ci95=cache.ci95.measured_cache,
        process_ci95=cache.ci95.measured_process,
        over=cache.over,
        nbytes=first.artifact.nbytes,
        load_ms=_ms([r.samples.load_ns for r in timed if r.samples]),
        cold_ms=_ms([c.load_ns + c.first_call_ns for r in group if (c := r.cold)]),
        ttft_ms=_ms(ttft),
        prefill_tok_s=percentile(rate, 50),
        prefill_ci95=process_interval(rate),
        prefill_by_process=rate,
        decode_tok_s=percentile(speed, 50),
        decode_ci95=process_interval(speed),
        decode_by_process=speed,
        step_bytes=step,
        limit_tok_s=bound,
        limit_share=speed_share(percentile(speed, 50), bound),
        tpot_ms=_ms(tpot),
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
        perplexity=quality.get("perplexity"),
        perplexity_stderr=quality.get("perplexity_stderr"),
        unstable=next((r.unstable for r in group if r.unstable), None),
        status=_worst(r.status for r in group),
        sha256=first.artifact.sha256,
    )


def _repetitions(result: BenchResult) -> tuple[tuple[int, ...], ...]:
    return result.samples.repetitions if result.samples else ()


def ttft_ns(result: BenchResult) -> list[int]:
    """Time to the first token of each repetition; empty without a prompt."""
    return [rep[0] for rep in _repetitions(result)] if result.workload.n_prompt else []


def tpot_ns(result: BenchResult) -> list[float]:
    """(t_last - t_first) / (n - 1) of each repetition; empty with fewer than two tokens timed."""
    return [(rep[-1] - rep[0]) / (len(rep) - 1) for rep in _repetitions(result) if len(rep) > 1]


def itl_ns(result: BenchResult) -> list[int]:
    """Every gap between two tokens, all repetitions together."""
    return [b - a for rep in _repetitions(result) for a, b in itertools.pairwise(rep)]


def read_bandwidth(results: Sequence[BenchResult]) -> list[Bandwidth]:
    """The best that any sweep measured: a limit is not lowered by a neighbour."""
    best: dict[tuple[int, int], Bandwidth] = {}
    for b in (b for r in results for b in r.conditions.read_bandwidth or ()):
        key = (b.n_threads, b.nbytes)
        if key not in best or best[key].bytes_per_s < b.bytes_per_s:
            best[key] = b
    return sorted(best.values(), key=lambda b: (b.n_threads, b.nbytes))


def _limit(
    decode: Sequence[BenchResult], cache: BytesPerToken, bandwidth: Sequence[Bandwidth]
) -> tuple[int | None, float | None]:
    """(bytes a decode step reads at least, tokens per second at which that fills the step)."""
    if not decode or (weights := decode[0].artifact.step_weight_bytes) is None:
        return None, None
    w = decode[0].workload
    # The gaps that TPOT averages end with steps that see depth + prompt + 2 ... + n_gen tokens.
    tokens = w.n_depth + w.n_prompt + (w.n_gen + (1 if w.n_prompt else 2)) / 2
    step = round(weights + tokens * cache.formula)
    rate = limit(bandwidth, w.n_threads, step)
    return step, None if rate is None else rate / step


def speed_share(speed: float | None, bound: float | None) -> float | None:
    return None if speed is None or not bound else speed / bound


def device_label(device: Device) -> str:
    """``AMD EPYC, 2 CPUs, Linux x86_64``; a phone by its model and system-on-chip."""
    what = device.model or device.cpu_model or "unknown CPU"
    parts = [what, device.soc, f"{device.cpu_count} CPUs" if device.cpu_count else None]
    parts.append(f"{device.os_version or device.system} {device.machine}")
    kind = "" if device.kind == "local" else f"{device.kind}: "
    return kind + ", ".join(p for p in parts if p) + " (emulated)" * device.emulated


def unusual(weights: str, dtype: str, layout: str) -> str:
    """What of a bundle is not the usual float32, for the end of its name: `` int4, int8 cache``."""
    words = [weights] * (weights != "fp32") + [f"{dtype} cache"] * (
        dtype != "fp32" and layout != "none"
    )
    return " " * bool(words) + ", ".join(words)


def _anon(memory: Memory | None, stage: str) -> int | None:
    found: Snapshot | None = getattr(memory, stage, None)
    return found.anonymous + found.swap if found else None


def _ms(values: Sequence[float]) -> float | None:
    middle = percentile(values, 50)
    return None if middle is None else middle / 1e6


def _worst(statuses: Iterable[str]) -> str:
    return max(statuses, key=("ok", "invalid", "failed").index)


def one_per_bundle(rows: Sequence[Row]) -> list[Row]:
    """The row of each bundle, device and driver with the fewest threads and the least depth."""
    first: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        first.setdefault((row.sha256, row.device, row.driver), row)
    return list(first.values())
