"""The report's figures of memory: per token, and against context."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from device_bench import svg
from device_bench.figures import Row, one_per_bundle
from device_bench.report_parts import (
    Cells,
    Section,
    count,
    in_order,
    legend,
    line_legend,
    listed,
    names,
    read,
)
from device_bench.result import BenchResult
from device_bench.svg import Mark, Rule, Series
from device_bench.svg_rows import Bar, bars
from device_bench.table import short, workspace
from edgeqkv.console import human_bytes

Kind = tuple[str, str, str, int]  # variant, layout, cache dtype, bytes per token
CONTEXTS = tuple(2**e for e in range(7, 18))
_POINT_COLUMNS = [
    "backend",
    "variant",
    "layout",
    "over",
    "tokens",
    "cache bytes",
    "process bytes",
    "dtype",
]


def memory_points(results: Sequence[BenchResult]) -> Cells:
    """Every reading behind a slope, once for each bundle and what ran it."""
    return [
        [
            r.artifact.backend,
            r.model.label,
            r.cache.layout,
            r.cache.bytes_per_token.over,
            p.tokens,
            p.cache_bytes,
            p.process_bytes,
            r.cache.dtype,
        ]
        for r in read(results)
        for p in r.cache.bytes_per_token.points
    ]


def per_token(rows: Sequence[Row], colours: dict[str, str], points: Cells) -> Section | None:
    bundles = [r for r in in_order(one_per_bundle(rows)) if r.formula]
    called = names(bundles)
    drawn = []
    for r in bundles:
        known = r.measured_cache if r.measured_cache is not None else r.declared
        if known is None:
            continue
        who, measured = called[r], r.measured_cache is not None
        what = "measured" if measured else "declared, not measured"
        parts = [(known, colours[r.variant], f"{who}: cache {count(known)} B per token, {what}")]
        if (extra := workspace(r)) is not None and extra > 0:
            parts.append((extra, "extra", f"{who}: {count(extra)} B per token beside the cache"))
        drawn.append(Bar(who, _numbers(r, known), parts, r.formula, not measured))
    if not drawn:
        return None
    seen = {css for bar in drawn for _, css, _ in bar.parts}
    table: Cells = [
        [
            r.backend,
            r.variant,
            r.layout,
            r.weights,
            r.dtype,
            r.formula,
            r.declared,
            short(r.measured_cache),
            short(r.measured_process),
            short(workspace(r)),
            r.over,
            r.device,
        ]
        for r in bundles
    ]
    return Section(
        key="memory-per-token",
        title="Memory per token",
        lede="What one more token of context costs, in bytes.",
        svg=svg.both(lambda w: bars(drawn, w, label="Bytes per token of every bundle")),
        legend=[
            *(key for key in legend(bundles, colours) if key[0] in seen),
            *([("extra", "box", "workspace of the process")] if "extra" in seen else []),
            ("", "tick", "formula"),
        ],
        columns=[
            "backend",
            "variant",
            "layout",
            "weights",
            "cache",
            "formula B/token",
            "declared",
            "measured",
            "process",
            "workspace",
            "over",
            "device",
        ],
        rows=table,
        sample_columns=_POINT_COLUMNS,
        samples=points,
        note="Coloured: the cache, the slope of its own resident memory. The mark: where the formula "
        "says that it ends. "
        + "Outlined: declared, not measured. " * any(bar.hollow for bar in drawn)
        + _WORKSPACE * ("extra" in seen)
        + "\N{PLUS-MINUS SIGN} is half of a 95 % interval, where that is more than 5 % of the figure."
        * any("\N{PLUS-MINUS SIGN}" in bar.value for bar in drawn),
    )


_WORKSPACE = (
    "Process: how all private memory of the process grows with the context, or with the context that "
    "a static cache is built for. Grey: workspace, what that is beyond the cache. It grows with depth "
    "because attention scores do, a float for each head and token of context in a decode step and for "
    "each row of a prefill chunk; what the allocator keeps comes on top. "
)


def _numbers(r: Row, cache: float) -> str:
    """``512 B cache, 5,163 B process``; what the process takes with the doubt about it."""
    found = f"{count(cache)} B cache"
    if r.measured_cache is None:
        return found + ", declared"
    if r.measured_process is None:
        return found
    low, high = r.process_ci95 or (0, 0)
    half = (high - low) / 2
    doubt = f" \N{PLUS-MINUS SIGN} {count(half)}" * (half > 0.05 * abs(r.measured_process))
    return f"{found}, {count(r.measured_process)}{doubt} B process"


def by_context(
    results: Sequence[BenchResult],
    rows: Sequence[Row],
    colours: dict[str, str],
    budgets: Sequence[tuple[str, int]],
    points: Cells,
) -> Section | None:
    kinds: dict[Kind, int] = {}  # and the positions that were learned
    for r in results:
        kind, learned = _kind(r), r.model.spec.max_position_embeddings
        if kind[3]:
            kinds[kind] = max(learned, kinds.get(kind, 0))
    if not kinds:
        return None
    series, readings = [], []
    alike: dict[int, list[str]] = {}
    # Dashed lines go over solid ones, and a variant's only line over those of one that has more: of
    # lines that coincide, every colour and dash is then seen somewhere.
    lines = Counter(variant for variant, *_ in kinds)
    for kind in sorted(kinds, key=lambda k: (k[1] != "shared", -lines[k[0]], k)):
        variant, layout, dtype, each = kind
        name = f"{variant} {layout}" + (f" {dtype}" if dtype != "fp32" else "")
        alike.setdefault(each, []).append(name)
        spots = [
            Mark(c, each * c, f"{name}: {human_bytes(each * c)} at {c:,} tokens") for c in CONTEXTS
        ]
        known = [m for m in spots if m.x <= kinds[kind]]
        line, css = "solid" if layout == "shared" else "dashed", colours[variant]
        series.append(Series(name, css, known, line, dots=False))
        beyond = spots[max(len(known) - 1, 0) :]
        if len(beyond) > 1:
            series.append(Series(name, css + " beyond", beyond, "dotted", dots=False))
        marks = [
            Mark(
                p.tokens,
                b,
                f"{name} on {r.artifact.backend}: {human_bytes(b)} at {p.tokens:,} tokens",
            )
            for r in read(results)
            if _kind(r) == kind
            for p in r.cache.bytes_per_token.points
            if (b := p.cache_bytes)
        ]
        readings.append(Series(name, css, marks, "none"))
    series += readings
    table: Cells = [
        [*kind, *(human_bytes(kind[3] * c) for c in (1024, 32768))]
        + [f"{size // kind[3]:,}" for _, size in budgets]
        for kind in sorted(kinds, key=lambda k: (-k[3], k[0] != "QKV", k))
    ]
    hidden = [listed(them) for them in alike.values() if len(them) > 1]
    every = [m.y for s in series for m in s.marks] + [float(size) for _, size in budgets]
    low, high = min(every), max(every)
    contexts = [m.x for s in series for m in s.marks]
    x = svg.log_axis("tokens of context", min(contexts), max(contexts), _tokens, base=2)
    y = svg.log_axis("cache, log scale", low / 1.5, high * 1.5, _size, base=2)
    y = dataclasses.replace(y, ticks=[t for t in y.ticks if round(t[0]).bit_length() % 4 == 1])
    rules = [Rule(size, f"budget: {name}") for name, size in budgets]
    return Section(
        key="cache-by-context",
        title="Cache against context",
        lede="How long a context a device's memory holds.",
        svg=svg.both(
            lambda w: svg.chart(
                series, x, y, w, label="Cache bytes by context", rules=rules, height=380
            )
        ),
        legend=[
            *legend([r for r in rows if r.formula], colours),
            *line_legend(series, "beyond the learned positions"),
            *([("", "dot", "measured")] if any(s.marks for s in readings) else []),
        ],
        columns=["variant", "layout", "cache", "B/token", "at 1,024", "at 32,768"]
        + [f"tokens in {name}" for name, _ in budgets],
        rows=table,
        sample_columns=_POINT_COLUMNS,
        samples=points,
        note="Lines are the formula"
        + ", dots are readings" * any(s.marks for s in readings)
        + ". "
        + "".join(f"On one line: {them}. " for them in hidden)
        + "A budget is for the cache alone: weights, workspace and the runtime come on top.",
    )


def _kind(r: BenchResult) -> Kind:
    return (r.model.label, r.cache.layout, r.cache.dtype, r.cache.bytes_per_token.formula)


def _size(value: float) -> str:
    return human_bytes(value).replace(".0 ", " ")


def _tokens(value: float) -> str:
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"
