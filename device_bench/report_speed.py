"""The report's figures of speed against depth and of quality against bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from html import escape

from device_bench import svg
from device_bench.compare import label, workload_label
from device_bench.figures import Row, one_per_bundle
from device_bench.report_parts import Cells, Section, count, legend, marked
from device_bench.result import BenchResult
from device_bench.svg import Axis, Mark, Series
from device_bench.table import short
from edgeqkv.console import human_bytes


def speed(
    results: Sequence[BenchResult], rows: Sequence[Row], colours: dict[str, str]
) -> Section | None:
    timed = [r for r in rows if r.decode_tok_s is not None]
    if not timed:
        return None
    limited = any(r.limit_tok_s for r in timed)
    # Not the intervals: two processes can make one span decades. They are cut at the edge instead.
    values = [v for r in timed for v in (r.decode_tok_s, r.limit_tok_s) if v]
    deepest = max(r.depth for r in timed)
    x = svg.linear_axis("tokens in the context before", 0, deepest or 1, count)
    low, high = min(values) / 1.5, max(values) * 1.5
    y = svg.log_axis("tokens per second, log scale", low, high, count)
    panels = []
    for key, group in itertools.groupby(
        sorted(timed, key=_panel), key=lambda r: (r.backend, r.threads, r.device)
    ):
        series = []
        members = list(group)
        lines = {(r.sha256, r.n_prompt, r.n_gen): r for r in members}
        for line, first in lines.items():
            own = [r for r in members if (r.sha256, r.n_prompt, r.n_gen) == line]
            own.sort(key=lambda r: r.depth)
            css = colours[first.variant] + ("" if first.layout == "shared" else " separate")
            style = "solid" if first.layout == "shared" else "dashed"
            series.append(Series(label(first), css, [_speed_mark(r) for r in own], style))
            bound = [
                Mark(r.depth, r.limit_tok_s, f"limit of {label(r)}") for r in own if r.limit_tok_s
            ]
            series.append(Series("limit", css, bound, "dotted", dots=False))
        backend, threads, device = key
        heading = f"{backend}, {threads} thread{'s' * (threads > 1)}"
        if len({r.device for r in timed}) > 1:
            heading += f", {device}"
        panels.append((heading + marked(members[0]), series))
    drawn = "".join(
        f"<h3>{escape(heading)}</h3>"
        + svg.both(functools.partial(_speed_chart, heading, series, x, y))
        for heading, series in panels
    )
    table: Cells = [
        [
            r.backend,
            r.variant,
            r.layout,
            r.weights,
            workload_label(r),
            short(r.decode_tok_s),
            _ends(r.decode_ci95),
            len(r.decode_by_process),
            short(r.itl_p50_ms),
            short(r.itl_p95_ms),
            short(r.ttft_ms),
            human_bytes(r.step_bytes) if r.step_bytes else None,
            short(r.limit_tok_s),
            f"{r.limit_share:.0%}" if r.limit_share else None,
        ]
        for r in timed
    ]
    return Section(
        key="decode-speed",
        title="Decode speed against depth",
        lede="Tokens per second, one sequence, by how much context came before.",
        svg=drawn,
        legend=[
            *legend(timed, colours),
            ("", "solid", "one tensor per layer"),
            ("", "dashed", "two"),
            *([("", "dotted", "limit by read bandwidth")] if limited else []),
        ],
        columns=[
            "backend",
            "variant",
            "layout",
            "weights",
            "test",
            "decode tok/s",
            "95 %",
            "processes",
            "ITL p50 ms",
            "p95 ms",
            "TTFT ms",
            "bytes a step reads",
            "limit tok/s",
            "share",
        ],
        rows=table,
        sample_columns=[
            "backend",
            "variant",
            "layout",
            "test",
            "process",
            "repetition",
            "ms to the first token",
            "ms between tokens",
        ],
        samples=_time_samples(results),
        note="Whiskers are 95 % intervals over processes."
        + " The dotted line is the speed at which a step would only read its weights and its cache."
        * limited,
    )


def _speed_chart(heading: str, series: Sequence[Series], x: Axis, y: Axis, width: int) -> str:
    return svg.chart(series, x, y, width, label=f"Decode speed by depth, {heading}")


def _panel(r: Row) -> tuple[str, int, str]:
    return (r.backend, r.threads, r.device)


def _speed_mark(r: Row) -> Mark:
    low, high = r.decode_ci95 or (None, None)
    text = f"{label(r)}, depth {r.depth}: {count(r.decode_tok_s or 0)} tok/s"
    if low is not None and high is not None:
        text += f" ({count(low)} to {count(high)})"
    return Mark(r.depth, r.decode_tok_s or 0, text + marked(r), low, high)


def _ends(ci95: tuple[float, float] | None) -> str | None:
    return None if ci95 is None else f"{count(ci95[0])} to {count(ci95[1])}"


def _time_samples(results: Sequence[BenchResult]) -> Cells:
    """One line per repetition, milliseconds; attempts that did not count say so."""
    lines: Cells = []
    for r in results:
        w, who = r.workload, [r.artifact.backend, r.model.label, r.cache.layout]
        if r.samples is None or r.artifact.interpreted:
            continue
        kept = [(s, f"{w.process + 1}, discarded") for s in r.discarded]
        for samples, process in [*kept, (r.samples, str(w.process + 1))]:
            for i, rep in enumerate(samples.repetitions, 1):
                gaps = " ".join(f"{(b - a) / 1e6:.3g}" for a, b in itertools.pairwise(rep))
                lines.append(
                    [*who, f"{w.label}, t{w.n_threads}", process, i, short(rep[0] / 1e6), gaps]
                )
    return lines


def quality(
    results: Sequence[BenchResult], rows: Sequence[Row], colours: dict[str, str]
) -> Section | None:
    known = [r for r in one_per_bundle(rows) if r.perplexity is not None]
    if not known:
        return None
    groups: dict[str, list[Mark]] = {}
    for r in known:
        value, half = r.perplexity or 0, 1.96 * (r.perplexity_stderr or 0)
        text = f"{label(r)}: perplexity {value:.4g}, {count(r.formula)} B per token"
        groups.setdefault(r.variant, []).append(
            Mark(r.formula, value, text, value - half, value + half)
        )
    every = [m for marks in groups.values() for m in marks]
    x = svg.log_axis(
        "bytes per token, log scale",
        min(m.x for m in every) / 1.6,
        max(m.x for m in every) * 1.6,
        lambda v: f"{v:,.0f}",
        base=2,
    )
    y = svg.linear_axis(
        "perplexity, lower is better",
        min(m.low or m.y for m in every),
        max(m.high or m.y for m in every),
        lambda v: f"{v:g}",
    )
    series = [Series(v, colours[v], marks, "none") for v, marks in groups.items()]
    table: Cells = [
        [
            r.backend,
            r.variant,
            r.layout,
            r.weights,
            r.dtype,
            r.formula,
            human_bytes(r.nbytes),
            short(r.perplexity),
            short(r.perplexity_stderr),
        ]
        for r in known
    ]
    seen: dict[str, list[object]] = {}
    for result in results:
        if result.quality:
            who = f"{result.artifact.backend} {result.model.label} {result.cache.layout}"
            seen[result.artifact.sha256] = [who, *(str(v) for v in result.quality.values())]
    keys = next(list(r.quality) for r in results if r.quality)
    return Section(
        key="quality",
        title="Quality against bytes",
        lede="What the smaller cache costs: perplexity of the same text.",
        svg=svg.both(lambda w: svg.chart(series, x, y, w, label="Perplexity by bytes per token")),
        legend=legend(known, colours),
        columns=[
            "backend",
            "variant",
            "layout",
            "weights",
            "cache",
            "B/token",
            "file",
            "perplexity",
            "standard error",
        ],
        rows=table,
        sample_columns=["bundle", *keys],
        samples=list(seen.values()),
        note="From edgeqkv eval over each bundle's own decode path. Whiskers are 95 % of the text's "
        "own variation, most of which all variants share.",
    )
