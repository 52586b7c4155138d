"""The tables of ``bench`` and ``compare``, for a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from device_bench.compare import Comparison, test_label
from device_bench.figures import Row, device_label, fold, one_per_bundle, unusual
from device_bench.ratios import ratios
from device_bench.result import BenchResult
from device_bench.stability import warnings
from edgeqkv.console import WIDTH, print_table

INTERPRETED = "interpreted"
EMULATED = "correctness\nonly"  # the width of the backend beside it is worth a second line
VERDICTS = {True: "REGRESSION", False: "ok", None: "not judged"}


@dataclasses.dataclass(frozen=True)
class Table:
    """A column is its name, after ``GROUP|`` where it shares a heading with its neighbours."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[object]]


Column = tuple[str, Callable[[Row], object]]
_WHO: tuple[Column, ...] = (
    ("backend", lambda r: runner(r)),
    ("variant", lambda r: r.variant),
    ("layout", lambda r: r.layout),
)
_BUNDLE: tuple[Column, ...] = (
    *_WHO,
    ("bytes/token|formula", lambda r: r.formula),
    ("bytes/token|declared", lambda r: r.declared),
    ("bytes/token|measured", lambda r: whole(r.measured_cache)),
    ("file\nMiB", lambda r: mib(r.nbytes)),
    ("load\nms", lambda r: short(r.load_ms)),
    ("TTFT\nms", lambda r: short(r.ttft_ms)),
    ("prefill\ntok/s", lambda r: short(r.prefill_tok_s)),
    ("decode\ntok/s", lambda r: decode_speed(r)),
    ("peak\nMiB", lambda r: mib(r.peak_rss)),
)
_MEMORY: tuple[Column, ...] = (
    *_WHO,
    ("over", lambda r: r.over),
    ("bytes/token|cache", lambda r: whole(r.measured_cache)),
    ("bytes/token|process", lambda r: short(r.measured_process)),
    (
        "bytes/token|+-",
        lambda r: short((r.process_ci95[1] - r.process_ci95[0]) / 2) if r.process_ci95 else None,
    ),
    ("bytes/token|workspace", lambda r: short(workspace(r))),
    ("anon MiB|import", lambda r: mib(r.anon_import)),
    ("anon MiB|load", lambda r: mib(r.anon_load)),
    ("anon MiB|prefill", lambda r: mib(r.anon_prefill)),
    ("anon MiB|decode", lambda r: mib(r.anon_decode)),
)
_SPEED: tuple[Column, ...] = (
    *_WHO,
    ("t", lambda r: r.threads),
    ("depth", lambda r: r.depth),
    ("cold\nms", lambda r: short(r.cold_ms)),
    ("TTFT\nms", lambda r: short(r.ttft_ms)),
    ("prefill\ntok/s", lambda r: short(r.prefill_tok_s)),
    ("decode\ntok/s", lambda r: decode_speed(r)),
    ("95 %\n+-%", lambda r: half_width(r.decode_ci95, r.decode_tok_s)),
    ("limit\n%", lambda r: percent(r.limit_share, 1)),
    ("ITL ms|p50", lambda r: short(r.itl_p50_ms)),
    ("ITL ms|p95", lambda r: short(r.itl_p95_ms)),
    ("ITL ms|p99", lambda r: short(r.itl_p99_ms)),
)
# Where a depth has more than one test: which, in the place of what is the bundle's.
_BY_TEST: tuple[Column, ...] = (
    *_SPEED[:5],
    ("test", test_label),
    *_SPEED[6:],
)
_QUALITY: tuple[Column, ...] = (
    *_WHO,
    ("weights", lambda r: r.weights),
    ("cache", lambda r: r.dtype),
    ("bytes/\ntoken", lambda r: r.formula),
    ("file\nMiB", lambda r: mib(r.nbytes)),
    ("perplexity", lambda r: short(r.perplexity)),
    ("95 %\n+-", lambda r: short(r.perplexity_stderr and 1.96 * r.perplexity_stderr)),
)


def runner(row: Row) -> str:
    """The backend and, where it is not Python on this machine, what ran it: ``onnx native``,
    ``onnx adb``, ``onnx wasm``."""
    driver = row.driver if row.kind in ("local", "browser") else row.kind
    return row.backend if driver == "python" else f"{row.backend} {driver}"


def decode_speed(row: Row) -> object:
    """tok/s; a word where a time says nothing about the real runtime or device."""
    if row.interpreted:
        return INTERPRETED
    ran = row.status != "failed"
    return EMULATED if row.emulated and ran else short(row.decode_tok_s)


def whole(value: float | None) -> float | None:
    """Bytes: without a point where there is nothing after it."""
    return int(value) if value is not None and value == int(value) else short(value)


def short(value: float | None) -> float | None:
    """Four digits at most: 1234, 123.4, 12.3, 0.12."""
    if value is None:
        return None
    return round(value) if abs(value) >= 1000 else round(value, 1 if abs(value) >= 10 else 2)


def workspace(row: Row) -> float | None:
    """Bytes per token that the process takes beside its cache; negative is the noise of it."""
    if row.measured_process is None or row.measured_cache is None:
        return None
    return row.measured_process - row.measured_cache


def mib(nbytes: int | None) -> float | None:
    """One digit after the point below 1000."""
    return None if nbytes is None else round(nbytes / 2**20, 1 if nbytes < 1000 << 20 else None)


def percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(100 * part / whole, 1)


def half_width(ci95: tuple[float, float] | None, value: float | None) -> float | None:
    """The farther end of an interval, in percent of the value."""
    if ci95 is None or not value:
        return None
    return percent(max(ci95[1] - value, value - ci95[0]), value)


def ends(ci95: tuple[float, float] | None) -> str | None:
    return None if ci95 is None else f"{ci95[0]:.3g} - {ci95[1]:.3g}"


def tables(results: Sequence[BenchResult]) -> list[Table]:
    """One row per bundle; the same against each other; and every depth and thread count. Devices of
    one kind, whose rows would look alike, have tables of their own."""
    labels = {device_label(r.device): r.device.kind for r in results}
    if len(labels) == len(set(labels.values())):
        return _tables(results)
    return [
        dataclasses.replace(table, title=f"{label}: {table.title}")
        for label in sorted(labels)
        for table in _tables([r for r in results if device_label(r.device) == label])
    ]


def _tables(results: Sequence[BenchResult]) -> list[Table]:
    rows = _told_apart(fold(results))
    bundles = one_per_bundle(rows)
    made = [_table(_title(bundles), _BUNDLE, bundles)]
    if found := ratios(fold(results), results):
        cells: list[list[object]] = [
            [
                *(r.backend, r.what, r.against),
                *map(_two, (r.formula, r.measured_cache, r.peak_rss, r.decode_tok_s)),
                ends(r.decode_ci95),
            ]
            for r in found
        ]
        names = ("backend", "bundle", "against", "formula", "measured")
        columns = (*names, "peak RSS", "decode", "95 %")
        made.append(Table("Ratios (bytes per token, memory, speed)", columns, cells))
    if any(r.measured_process is not None for r in bundles):
        made.append(_table("Memory: slopes, and what the process holds", _MEMORY, bundles))
    if known := [r for r in bundles if r.perplexity is not None]:
        made.append(_table("Quality, from `edgeqkv eval`", _QUALITY, known))
    if len(rows) > len(bundles) or any(r.decode_ci95 or r.limit_share for r in rows):
        several = len({test_label(r) for r in rows}) > 1
        made.append(_table("Speed by threads and depth", _BY_TEST if several else _SPEED, rows))
    return made


def _told_apart(rows: Sequence[Row]) -> list[Row]:
    """With the formats of weights and cache after the variant, where rows differ in them."""
    weights = len({r.weights for r in rows}) > 1
    dtypes = len({(r.backend, r.dtype) for r in rows}) > len({r.backend for r in rows})

    def named(row: Row) -> Row:
        formats = [row.weights] * weights + [row.dtype] * (dtypes and row.layout != "none")
        return dataclasses.replace(row, variant=" ".join([row.variant, "/".join(formats)]).rstrip())

    return [named(row) for row in rows]


def comparison_table(found: Sequence[Comparison], limit: float | None) -> Table:
    """The ratios to a baseline; with a limit, which of them are regressions."""
    columns = ["bundle", "test", "figure", "ratio", "95 %", "value", "base"]
    rows: list[list[object]] = []
    for c in found:
        cells: list[object] = [c.who, c.test, c.figure, _two(c.ratio), ends(c.ci95)]
        verdict = [] if limit is None else [VERDICTS[c.regressed(limit)]]
        rows.append([*cells, short(c.value), short(c.base), *verdict])
    bases = {c.against for c in found} if all(c.who != c.against for c in found) else set()
    title = f"Against {bases.pop()}" if len(bases) == 1 else "Against the same rows of the baseline"
    title += f", limit {limit:.1%}" if limit is not None else ""
    return Table(title, (*columns, *([""] if limit is not None else [])), rows)


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    names = tuple(name for name, _ in columns)
    return Table(title, names, [[read(row) for _, read in columns] for row in rows])


def _two(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _title(bundles: Sequence[Row]) -> str:
    def each(field: str) -> str:
        return "/".join(str(v) for v in sorted({getattr(r, field) or 0 for r in bundles}))

    tests = " / ".join(sorted({test_label(r) for r in bundles}))
    return f"{tests} at depth {each('depth')}, threads {each('threads')}; medians"


def problems(results: Sequence[BenchResult]) -> list[str]:
    """A line for each result that is not ok, and for each reason that figures have a gap for."""
    lines = [f"{r.status}: {describe(r)}: {r.reason}" for r in results if r.status != "ok"]
    gaps: dict[str, dict[str, None]] = {}
    for r in results:
        if r.status == "ok" and (reason := r.cache.bytes_per_token.reason):
            gaps.setdefault(reason, {})[name(r)] = None
    missing = [f"not measured: {'; '.join(who)}: {reason}" for reason, who in gaps.items()]
    doubts = [f"warning: {line}" for line in warnings(results, fold(results))]
    return [*dict.fromkeys(lines), *missing, *doubts]


def name(result: BenchResult) -> str:
    """``onnx Q-MQA shared int4``."""
    formats = unusual(result.artifact.stored_weights, result.cache.dtype, result.cache.layout)
    return f"{result.artifact.backend} {result.model.label} {result.cache.layout}{formats}"


def describe(result: BenchResult) -> str:
    """``onnx Q-MQA shared int4 tg32 @ d512, 2 threads``."""
    w = result.workload
    return f"{name(result)} {w.label}, {w.n_threads} thread{'s' * (w.n_threads > 1)}"


def headings(columns: Sequence[str]) -> list[str]:
    """For a terminal: the words of a group spread above its columns, ``bytes/ token`` above three."""
    made: list[str] = []
    for group, own in itertools.groupby(columns, lambda c: c.partition("|")[0] if "|" in c else ""):
        words = itertools.chain(re.findall(r"[^ /]+/?", group), itertools.repeat(""))
        for column in own:
            made.append(f"{next(words)}\n{column.partition('|')[2]}" if group else column)
    return made


def print_results(results: Sequence[BenchResult], more: Sequence[Table] = ()) -> None:
    """Everything that ``compare`` shows, on stdout."""
    for i, table in enumerate([*tables(results), *more]):
        if i:
            print()
        print_table(headings(table.columns), table.rows, title=table.title, gap=1)
    if found := problems(results):
        print()
        for line in found:
            print(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False))


def markdown(results: Sequence[BenchResult], more: Sequence[Table] = ()) -> str:
    parts = []
    for table in [*tables(results), *more]:
        lines = [_line(" ".join(c.replace("|", " ").split()) for c in table.columns)]
        lines.append(_line("---" for _ in table.columns))
        lines += [_line(_word(cell) for cell in row) for row in table.rows]
        parts.append(f"**{table.title}**\n\n" + "\n".join(lines))
    parts += ["\n".join(f"- {p}" for p in problems(results))] if problems(results) else []
    return "\n\n".join(parts)


def _word(cell: object) -> str:
    return "-" if cell is None else " ".join(str(cell).split())


def _line(cells: Any) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def to_csv(results: Sequence[BenchResult]) -> str:
    """Every field of every row, unrounded; empty where it was not measured."""
    out = io.StringIO()
    names = [f.name for f in dataclasses.fields(Row)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in fold(results))
    return out.getvalue()
