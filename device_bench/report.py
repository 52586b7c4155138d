"""``edgeqkv compare -o report.html``: one self-contained page; the figures are in report_memory,
report_speed and report_stack.

Everything that comes out of a result file is text: the template escapes it, svg.py escapes it, and
the page's own policy lets no script run but the one in the template, and nothing load.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from device_bench.compare import Comparison, devices, mixtures
from device_bench.figures import Row, device_label, fold, one_per_bundle, read_bandwidth
from device_bench.ratios import model_size
from device_bench.report_memory import by_context, memory_points, per_token
from device_bench.report_parts import (
    Cells,
    Section,
    colours_of,
    count,
    figure,
    listed,
    plural,
    times,
)
from device_bench.report_speed import quality, speed
from device_bench.report_stack import stack
from device_bench.result import BenchResult
from device_bench.table import comparison_table, half_width, problems
from edgeqkv.console import human_bytes
from edgeqkv.errors import MissingDependencyError, UsageError
from edgeqkv.estimate import parse_bytes

# Sizes to see a cache against where no --budget names a device.
BUDGETS = (("32 MiB", 32 << 20), ("512 MiB", 512 << 20), ("2 GiB", 2 << 30))

_NAMES = {
    "coreml": "Core ML",
    "executorch": "ExecuTorch",
    "genai": "ONNX Runtime GenAI",
    "gguf": "llama.cpp",
    "onnx": "ONNX Runtime",
    "optimum": "Optimum",
}

WORTH_A_HEADLINE = 0.1  # of the figure: half of its 95 % interval at most


@dataclasses.dataclass(frozen=True)
class Headline:
    """A number worth a large letter, and what it is."""

    figure: str
    what: str


def parse_budget(text: str) -> tuple[str, int]:
    """``512MiB`` or ``a watch=512MiB`` -> (label, bytes); raises UsageError."""
    name, equals, size = text.rpartition("=")
    nbytes = parse_bytes(size)
    if nbytes < 1 or (equals and not name.strip()):
        raise UsageError(f"--budget is {text!r}; examples: 512MiB, a watch=512MiB")
    return (f"{name.strip()}, {human_bytes(nbytes)}" if name else human_bytes(nbytes)), nbytes


def report(
    results: Sequence[BenchResult],
    found: Sequence[Comparison] = (),
    limit: float | None = None,
    budgets: Sequence[tuple[str, int]] = (),
) -> str:
    """The page. ``found``: ratios to a baseline, ``limit`` what counts as a regression."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise MissingDependencyError("the report needs jinja2: pip install 'jinja2>=3'") from None
    folder = files("device_bench")
    source, style, script = (
        folder.joinpath(name).read_text("utf-8")
        for name in ("report.html.j2", "report.css", "report.js")
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"lines": lambda n: plural(n, "line"), "figure": figure, "sides": _sides}
    rows = fold(results)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    drawn = sections(results, rows, budgets or BUDGETS)
    return environment.from_string(source).render(
        title=_title(rows),
        setup=_setup(results, rows),
        headlines=headlines(results, rows),
        sections=[{**vars(s), "svg": Markup(s.svg)} for s in drawn],
        baseline=_baseline(found, limit),
        doubts=problems(results),
        mixtures=_mixtures(results),
        facts=_facts(results),
        tools=_tools(results),
        style=Markup(style),
        script=Markup(script),
        digest=digest,
    )


def sections(
    results: Sequence[BenchResult], rows: Sequence[Row], budgets: Sequence[tuple[str, int]]
) -> list[Section]:
    """Those figures for which something was measured, in the order of the page."""
    colours, points = colours_of(rows), memory_points(results)
    made = (
        per_token(rows, colours, points),
        by_context(results, rows, colours, budgets, points),
        speed(results, rows, colours),
        stack(results, rows, colours),
        quality(results, rows, colours),
    )
    return [section for section in made if section is not None]


def _title(rows: Sequence[Row]) -> str:
    return "Memory per token" + " and latency" * any(r.decode_tok_s or r.ttft_ms for r in rows)


def _setup(results: Sequence[BenchResult], rows: Sequence[Row]) -> str:
    """``Core ML (interpreted) and ONNX Runtime on AMD EPYC, 2 CPUs, Linux x86_64``."""
    ran = {r.backend: all(x.interpreted for x in rows if x.backend == r.backend) for r in rows}
    engines = [_NAMES.get(b, b) + " (interpreted)" * mute for b, mute in sorted(ran.items())]
    return f"{listed(engines)} on {'; '.join(sorted({device_label(r.device) for r in results}))}"


def headlines(results: Sequence[BenchResult], rows: Sequence[Row]) -> list[Headline]:
    """Three numbers at most, each only where it was measured; names do not break at their hyphens."""
    found = []
    measured = [r for r in one_per_bundle(rows) if r.formula and r.measured_cache is not None]
    if pair := _farthest(results, measured):
        least, most = pair
        what = (
            f"less cache: {count(least.formula)}\N{NO-BREAK SPACE}B a token for {least.variant} {least.layout}, "
            f"{count(most.formula)}\N{NO-BREAK SPACE}B for {most.variant} {most.layout}"
        )
        found.append(Headline(times(most.formula / least.formula), what))
    if measured:
        agree = sum(r.status == "ok" for r in measured)
        what = "measured bundles: formula, declaration and measurement agree within 3 %"
        found.append(Headline(f"{agree} of {len(measured)}", what))
    timed = [r for r in rows if r.decode_tok_s]
    best = max(timed, key=lambda r: r.decode_tok_s or 0, default=None)
    if best and _repeats(best):  # no other may be called the most: the true best may be any
        what = (
            f"tokens per second at most: {best.variant} {best.layout} on {best.backend}, "
            f"depth {best.decode_depth:,}, {plural(best.threads, 'thread')}"
        )
        found.append(Headline(count(best.decode_tok_s or 0), what))
    return [Headline(h.figure, h.what.replace("-", "\N{NON-BREAKING HYPHEN}")) for h in found]


def _farthest(results: Sequence[BenchResult], rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """The least and the most cache of models of one size and cache dtype, where they differ most."""
    specs = {r.artifact.sha256: r.model.spec for r in results}
    alike: dict[tuple[object, ...], list[Row]] = {}
    for r in sorted(rows, key=lambda r: r.formula):
        alike.setdefault((r.dtype, *model_size(specs[r.sha256])), []).append(r)
    pairs = [(them[0], them[-1]) for them in alike.values() if them[0].formula < them[-1].formula]
    return max(pairs, key=lambda pair: pair[1].formula / pair[0].formula, default=None)


def _repeats(row: Row) -> bool:
    """Whether a speed will be much the same tomorrow: a large letter is for no other."""
    half = half_width(row.decode_ci95, row.decode_tok_s)
    return half is not None and half <= 100 * WORTH_A_HEADLINE


def _mixtures(results: Sequence[BenchResult]) -> list[str]:
    machines = devices(results)
    several = [f"{len(machines)} devices: {'; '.join(machines)}"] if len(machines) > 1 else []
    return several + mixtures(results)


def _baseline(found: Sequence[Comparison], limit: float | None) -> dict[str, Any] | None:
    return dataclasses.asdict(comparison_table(found, limit)) if found else None


def _facts(results: Sequence[BenchResult]) -> list[tuple[str, str]]:
    """What the machines were and the state they were in, every distinct value."""
    first, last = (f(r.conditions.started_at for r in results) for f in (min, max))
    known = read_bandwidth(results)
    largest = max((b.nbytes for b in known), default=0)
    loads = [x for r in results if (x := r.conditions.load_average_1m) is not None]
    rows = {
        "device": {device_label(r.device) for r in results},
        "memory": {human_bytes(m) for r in results if (m := r.device.memory_bytes)},
        "CPU features": {" ".join(r.device.features) for r in results if r.device.features},
        "read bandwidth": {
            f"{b.bytes_per_s / 1e9:.1f} GB/s with {plural(b.n_threads, 'thread')} "
            f"over {b.nbytes >> 20} MiB"
            for b in known
            if b.nbytes == largest
        },
        "governor": {r.conditions.governor or "not readable" for r in results},
        "power": {r.conditions.power or "not readable" for r in results},
        "load average": {f"{min(loads):.1f} to {max(loads):.1f}"} if loads else set(),
        "measured": {f"{_time(first)} to {_time(last)}"},
        "results": {
            f"{plural(len(results), 'process', 'processes')}, "
            f"{plural(len({r.run_id for r in results}), 'sweep')}"
        },
    }
    return [(name, "; ".join(sorted(values))) for name, values in rows.items() if values]


def _time(iso: str) -> str:
    return iso.replace("T", " ").replace("+00:00", " UTC")


def _sides(rows: Cells, columns: int) -> list[str]:
    """The class of each column: ``n``, to the right, where the first cell that is known is a number."""
    first = [next((row[i] for row in rows if row[i] not in (None, "")), "") for i in range(columns)]
    return ["n" if isinstance(x, int | float) or str(x)[:1].isdigit() else "" for x in first]


def _tools(results: Sequence[BenchResult]) -> list[tuple[str, str, str]]:
    """(backend, engine, versions of the tools that wrote the bundle)."""
    found = {
        (
            r.artifact.backend,
            r.artifact.engine or "never loaded",
            ", ".join(f"{k} {v}" for k, v in sorted(r.artifact.tools.items())),
        )
        for r in results
    }
    return sorted(found)
