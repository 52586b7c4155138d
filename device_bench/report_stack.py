"""The report's figure of what a process's memory is used for."""

from __future__ import annotations

from collections.abc import Sequence

from device_bench import svg
from device_bench.figures import Row, one_per_bundle
from device_bench.report_parts import Section, in_order, legend, names, ran
from device_bench.result import BenchResult
from device_bench.svg_rows import Bar, bars
from edgeqkv.console import human_bytes


def stack(
    results: Sequence[BenchResult], rows: Sequence[Row], colours: dict[str, str]
) -> Section | None:
    """Of the deepest workload whose memory was read: weights, cache, and what else the run took."""
    deepest: dict[tuple[str, str, str], BenchResult] = {}
    for r in results:
        if r.memory and (
            (known := deepest.get(ran(r))) is None or r.workload.n_tokens > known.workload.n_tokens
        ):
            deepest[ran(r)] = r
    bundles = [
        r for r in in_order(one_per_bundle(rows)) if (r.sha256, r.device, r.driver) in deepest
    ]
    called, drawn, table, samples = names(bundles), [], [], []
    for row in bundles:
        r = deepest[(row.sha256, row.device, row.driver)]
        m, w, who = r.memory, r.workload, called[row]
        if m is None or not (end := m.after_decode or m.after_prefill):
            continue
        runtime = (m.after_import or m.baseline).rss
        each = r.cache.bytes_per_token
        tokens = w.n_tokens if r.cache.mode == "growing" else r.cache.capacity
        cache = round((each.measured_cache or each.formula) * tokens)
        grew = max(end.rss - runtime, cache)
        weights = min(r.artifact.nbytes, grew - cache)
        rest = grew - cache - weights
        named = (("weights", weights), (colours[row.variant], cache), ("extra", rest))
        parts = [
            (float(n), css, f"{who}: {what} {human_bytes(n)}")
            for (css, n), what in zip(named, ("weights", "cache", "workspace"), strict=True)
        ]
        value = f"{human_bytes(grew)}, {human_bytes(cache)} of it cache"
        drawn.append(Bar(f"{who}, {tokens:,} tokens", value, parts))
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
        svg=svg.both(lambda w: bars(drawn, w, label="Resident memory by purpose")),
        legend=[
            ("weights", "box", "weights"),
            *((css, box, f"cache of {who}") for css, box, who in legend(bundles, colours)),
            ("extra", "box", "workspace"),
        ],
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
        note="The whole bar: what RSS grew by since the runtime was imported. Cache: measured bytes per "
        "token times the tokens held (growing) or reserved (static). Weights: the size of the model's "
        "files. Workspace: the rest, arenas and copies of weights included. The runtime's own memory is "
        "in the table.",
    )
