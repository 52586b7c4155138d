"""The report's figures of memory: per token, against context, and what it is used for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from device_bench import svg
from device_bench.compare import label
from device_bench.figures import Row, one_per_bundle
from device_bench.report_parts import Cells, Section, count, legend, marked
from device_bench.result import BenchResult
from device_bench.svg import Bar, Mark, Rule, Series
from device_bench.table import short, workspace
from edgeqkv.console import human_bytes

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
    """Every reading behind a slope, once for each bundle."""
    bundles: dict[tuple[str, str | None], BenchResult] = {}
    for r in results:
        if r.cache.bytes_per_token.points:
            bundles.setdefault((r.artifact.sha256, r.device.id), r)
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
        for r in bundles.values()
        for p in r.cache.bytes_per_token.points
    ]


def per_token(rows: Sequence[Row], colours: dict[str, str], points: Cells) -> Section | None:
    bundles = [r for r in one_per_bundle(rows) if r.formula]
    bundles.sort(key=lambda r: (r.backend, -r.formula, r.variant != "QKV"))
    if not bundles:
        return None
    drawn = []
    for r in bundles:
        known = r.measured_cache if r.measured_cache is not None else r.declared
        if known is None:
            continue
        what = "measured" if r.measured_cache is not None else "declared, not measured"
        parts = [
            (known, colours[r.variant], f"{label(r)}: cache {count(known)} B per token, {what}")
        ]
        if (extra := workspace(r)) is not None and extra > 0:
            parts.append(
                (extra, "extra", f"{label(r)}: {count(extra)} B per token beside the cache")
            )
        end = f"{count(known)} B" + ("" if r.measured_cache is not None else " declared")
        where = f", {r.device.split(',')[0]}" if len({b.device for b in bundles}) > 1 else ""
        drawn.append(
            Bar(label(r) + where + marked(r), end, parts, r.formula, r.measured_cache is None)
        )
    if not drawn:
        return None
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
        svg=svg.both(lambda w: svg.bars(drawn, w, label="Bytes per token of every bundle")),
        legend=[
            *legend(bundles, colours),
            ("extra", "box", "workspace of the process"),
            ("", "tick", "formula"),
        ],
        columns=[
            "backend",
            "variant",
            "layout",
            "weights",
            "cache",
            "formula",
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
        note="Bar: slope of the cache's own resident memory. The mark is where the formula says that "
        "it ends. Workspace: how much faster the whole process grows.",
    )


def by_context(
    results: Sequence[BenchResult],
    rows: Sequence[Row],
    colours: dict[str, str],
    budgets: Sequence[tuple[str, int]],
    points: Cells,
) -> Section | None:
    kinds = dict.fromkeys((r.variant, r.layout, r.dtype, r.formula) for r in rows if r.formula)
    if not kinds:
        return None
    learned = {r.model.label: r.model.spec.max_position_embeddings for r in results}
    series, table = [], []
    for variant, layout, dtype, each in kinds:
        name = f"{variant} {layout}" + (f" {dtype}" if dtype != "fp32" else "")
        spots = [
            Mark(c, each * c, f"{name}: {human_bytes(each * c)} at {c:,} tokens") for c in CONTEXTS
        ]
        known = [m for m in spots if m.x <= learned[variant]]
        line = "solid" if layout == "shared" else "dashed"
        series.append(Series(name, colours[variant], known, line, dots=False))
        series.append(
            Series(
                name, colours[variant] + " beyond", spots[len(known) - 1 :], "dotted", dots=False
            )
        )
        read = [p for p in points if p[1:3] == [variant, layout] and p[7] == dtype]
        marks = [
            Mark(t, b, f"{name} on {p[0]}: {human_bytes(b)} measured at {t:,} tokens")
            for p in read
            if isinstance(t := p[4], int) and isinstance(b := p[5], int) and b
        ]
        series.append(Series(name, colours[variant], marks, "none"))
        fits = [f"{size // each:,}" for _, size in budgets]
        table.append(
            [variant, layout, dtype, each, *(human_bytes(each * c) for c in (1024, 32768)), *fits]
        )
    every = [m.y for s in series for m in s.marks] + [float(size) for _, size in budgets]
    low, high = min(every), max(every)
    x = svg.log_axis("tokens of context", CONTEXTS[0], CONTEXTS[-1], lambda v: _tokens(v), base=2)
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
            *legend(rows, colours),
            ("", "solid", "one tensor per layer"),
            ("", "dashed", "two"),
            ("", "dotted", "beyond the learned positions"),
            ("", "dot", "measured"),
        ],
        columns=["variant", "layout", "cache", "B/token", "at 1,024", "at 32,768"]
        + [f"tokens in {name}" for name, _ in budgets],
        rows=table,
        sample_columns=_POINT_COLUMNS,
        samples=points,
        note="Lines are the formula, dots are readings. A budget is for the cache alone: weights, "
        "workspace and the runtime come on top.",
    )


def _size(value: float) -> str:
    return human_bytes(value).replace(".0 ", " ")


def _tokens(value: float) -> str:
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"


def stack(results: Sequence[BenchResult], rows: Sequence[Row]) -> Section | None:
    """Of the deepest workload whose memory was read: weights, cache, and what else the run took."""
    deepest: dict[tuple[str, str | None], BenchResult] = {}
    for r in results:
        key = (r.artifact.sha256, r.device.id)
        if r.memory and (
            key not in deepest or r.workload.n_tokens > deepest[key].workload.n_tokens
        ):
            deepest[key] = r
    drawn, table, samples = [], [], []
    order = {r.sha256: i for i, r in enumerate(rows)}
    for r in sorted(deepest.values(), key=lambda r: order.get(r.artifact.sha256, 0)):
        m, w = r.memory, r.workload
        if m is None or not (end := m.after_decode or m.after_prefill):
            continue
        runtime = (m.after_import or m.baseline).rss
        each = r.cache.bytes_per_token
        tokens = w.n_tokens if r.cache.mode == "growing" else r.cache.capacity
        cache = round((each.measured_cache or each.formula) * tokens)
        weights = r.artifact.nbytes
        rest = max(0, end.rss - runtime - weights - cache)
        who = f"{r.artifact.backend} {r.model.label} {r.cache.layout}"
        named = (("weights", weights), ("cache", cache), ("workspace", rest))
        parts = [(float(n), f"part-{k}", f"{who}: {k} {human_bytes(n)}") for k, n in named]
        drawn.append(Bar(f"{who} @ {tokens:,}", human_bytes(weights + cache + rest), parts))
        table.append(
            [r.artifact.backend, r.model.label, r.cache.layout, w.label, tokens]
            + [human_bytes(n) for n in (weights, cache, rest, runtime, m.peak_rss)]
        )
        stages = ("baseline", "after_import", "after_load", "after_prefill", "after_decode")
        for stage in stages:
            if (s := getattr(m, stage)) is not None:
                samples.append(
                    [
                        who,
                        stage.replace("_", " "),
                        s.rss,
                        s.pss,
                        s.uss,
                        s.anonymous,
                        s.swap,
                        s.file_clean,
                        s.private_dirty,
                    ]
                )
    if not drawn:
        return None
    return Section(
        key="memory-stack",
        title="Weights, cache and workspace",
        lede="What a loaded model adds to a process that has its runtime, at the deepest context measured.",
        svg=svg.both(lambda w: svg.bars(drawn, w, label="Resident memory by purpose")),
        legend=[(f"part-{k}", "box", k) for k in ("weights", "cache", "workspace")],
        columns=[
            "backend",
            "variant",
            "layout",
            "test",
            "tokens",
            "weights",
            "cache",
            "workspace",
            "runtime (not drawn)",
            "peak RSS",
        ],
        rows=table,
        sample_columns=[
            "bundle",
            "stage",
            "RSS",
            "PSS",
            "USS",
            "anonymous",
            "swap",
            "clean file pages",
            "private dirty",
        ],
        samples=samples,
        note="Weights: the size of the model's files. Cache: measured bytes per token times the tokens "
        "held (growing) or reserved (static). Workspace: what RSS grew by beyond the two, arenas and "
        "copies of weights included. The runtime's own memory is in the table.",
    )
