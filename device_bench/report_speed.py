"""The report's figures of speed against depth and of quality against bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from html import escape

from device_bench import svg
from device_bench.compare import test_label, workload_label
from device_bench.figures import Row, one_per_bundle
from device_bench.report_parts import (
    Cells,
    Section,
    count,
    in_order,
    legend,
    line_legend,
    marked,
    names,
    plural,
)
from device_bench.result import BenchResult
from device_bench.svg import Axis, Mark, Series
from device_bench.svg_rows import Dot, dots
from device_bench.table import short
from edgeqkv.console import human_bytes


def speed(
    results: Sequence[BenchResult], rows: Sequence[Row], colours: dict[str, str]
) -> Section | None:
    timed = [r for r in rows if r.decode_tok_s is not None]
    if not timed:
        return None
    timed, axis = in_order(timed), _speed_axis(timed)
    depths = sorted({r.decode_depth for r in timed})
    draw = _by_bundle if len(depths) == 1 else _by_depth
    drawn, key = draw(timed, colours, axis)
    ends = [end for r in timed for end in r.decode_ci95 or ()]
    cut = any(end < axis.low or end > axis.high for end in ends)
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
            f"{100 * r.limit_share:.0f} %" if r.limit_share else None,
        ]
        for r in timed
    ]
    return Section(
        key="decode-speed",
        title="Decode speed" + " against depth" * (len(depths) > 1),
        lede="Tokens per second, one sequence, "
        + (
            "by how much context came before."
            if len(depths) > 1
            else f"after {plural(depths[0], 'token')} of context."
            if depths[0]
            else "from the first token on."
        ),
        svg=drawn,
        legend=[*legend(timed, colours), *key],
        columns=[
            "backend",
            "variant",
            "layout",
            "weights",
            "test",
            "decode tok/s",
            "95 % interval",
            "processes",
            "ITL p50 ms",
            "ITL p95 ms",
            "TTFT ms",
            "bytes a step reads",
            "limit tok/s",
            "of the limit",
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
        note="Whiskers are 95 % intervals over processes. " * bool(ends)
        + "An arrow: the interval goes on beyond the figure. " * cut
        + "Dotted is the limit, the speed at which a step would only read its weights and its cache."
        * any(r.limit_tok_s for r in timed),
    )


def _speed_axis(timed: Sequence[Row]) -> Axis:
    """Speeds and limits; intervals too, but not where two processes make one span decades."""
    values = [v for r in timed for v in (r.decode_tok_s, r.limit_tok_s) if v]
    low, high = min(values), max(values)
    ends = [end for r in timed for end in r.decode_ci95 or () if low / 3 < end < high * 3]
    low, high = min([low, *ends]) / 1.2, max([high, *ends]) * 1.2
    return svg.log_axis("tokens per second, log scale", low, high, count)


Drawn = tuple[str, list[tuple[str, str, str]]]  # the figure, and what of its legend is not colours


def _by_bundle(timed: Sequence[Row], colours: dict[str, str], axis: Axis) -> Drawn:
    """One depth: a row for every bundle, test and thread count."""
    called = names(timed)
    tests = {r: workload_label(r) for r in timed}
    rows = []
    for r in timed:
        value = f"{count(r.decode_tok_s or 0)} tok/s"
        if r.decode_ci95:
            value += f" ({_ends(r.decode_ci95)})"
        value += f", limit {count(r.limit_tok_s)}" if r.limit_tok_s else ""
        who = called[r] + f", {tests[r]}" * (len(set(tests.values())) > 1)
        low, high = r.decode_ci95 or (None, None)
        mark = Mark(r.decode_tok_s or 0, 0, f"{who}: {value}", low, high)
        rows.append(Dot(who, value, colours[r.variant], mark, r.limit_tok_s))
    key = [("", "solid", "95 % interval")] * any(r.decode_ci95 for r in timed)
    key += [("", "bound", "limit by read bandwidth")] * any(r.limit_tok_s for r in timed)
    return svg.both(lambda w: dots(rows, axis, w, label="Decode speed of every bundle")), key


def _by_depth(timed: Sequence[Row], colours: dict[str, str], y: Axis) -> Drawn:
    """A panel for whatever its lines cannot tell apart: they have a variant's colour and a layout's dash."""
    x = svg.linear_axis(
        "tokens in the context before", 0, max(r.decode_depth for r in timed), count
    )
    x = dataclasses.replace(x, low=-x.high / 25, high=x.high * 26 / 25)  # room for the shifts
    called, several = names(timed), len({r.device for r in timed}) > 1
    tests = {test_label(r) for r in timed}

    def panel(r: Row) -> str:
        known = [r.backend, f"{r.weights} weights" * (r.weights != "fp32")]
        known += [f"{r.dtype} cache" * (r.dtype != "fp32"), r.driver * (r.driver != "python")]
        known += [test_label(r)] * (len(tests) > 1) + [plural(r.threads, "thread")]
        return ", ".join([k for k in known if k] + [r.device] * several) + marked(r)

    drawn, every = [], []
    for heading, group in itertools.groupby(sorted(timed, key=panel), key=panel):
        series: list[Series] = []
        lines: dict[tuple[str, str], list[Row]] = {}
        for r in group:
            lines.setdefault((called[r], r.sha256), []).append(r)
        for i, own in enumerate(lines.values()):
            own.sort(key=lambda r: r.decode_depth)
            shift = 4 * (i - (len(lines) - 1) / 2)
            css = colours[own[0].variant] + ("" if own[0].layout == "shared" else " separate")
            style = "solid" if own[0].layout == "shared" else "dashed"
            marks = [_speed_mark(r, called[r]) for r in own]
            bound = [
                Mark(r.decode_depth, r.limit_tok_s, f"limit of {called[r]}")
                for r in own
                if r.limit_tok_s
            ]
            series.append(Series(called[own[0]], css, marks, style, shift=shift))
            series.append(Series("limit", css, bound, "dotted", dots=False))
        chart = functools.partial(_speed_chart, heading, series, x, y)
        drawn.append(f"<h3>{escape(heading)}</h3>" + svg.both(chart))
        every += series
    return "".join(drawn), line_legend(every, "limit by read bandwidth")


def _speed_chart(heading: str, series: Sequence[Series], x: Axis, y: Axis, width: int) -> str:
    return svg.chart(series, x, y, width, label=f"Decode speed by depth, {heading}")


def _speed_mark(r: Row, who: str) -> Mark:
    low, high = r.decode_ci95 or (None, None)
    text = f"{who}, depth {r.decode_depth:,}: {count(r.decode_tok_s or 0)} tok/s"
    if r.decode_ci95:
        text += f" ({_ends(r.decode_ci95)})"
    return Mark(r.decode_depth, r.decode_tok_s or 0, text, low, high)


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
    known = [r for r in one_per_bundle(rows) if r.perplexity is not None and r.formula]
    if not known:
        return None
    called = names(known)
    groups: dict[str, list[Mark]] = {}
    for r in known:
        value, half = r.perplexity or 0, 1.96 * (r.perplexity_stderr or 0)
        text = f"{called[r]}: perplexity {value:.4g}, {count(r.formula)} B per token"
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
            f"{r.perplexity:.2f}",
            short(r.perplexity_stderr),
        ]
        for r in known
    ]
    judged = {r.artifact.sha256: r for r in results if r.quality}
    keys = list(dict.fromkeys(key for r in judged.values() for key in r.quality or ()))
    seen: Cells = [
        [
            f"{r.artifact.backend} {r.model.label} {r.cache.layout}",
            *(str(v) if (v := (r.quality or {}).get(key)) is not None else None for key in keys),
        ]
        for r in judged.values()
    ]
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
        samples=seen,
        note="From edgeqkv eval over each bundle's own decode path. Whiskers are 95 % of the text's "
        "own variation, most of which all variants share.",
    )
