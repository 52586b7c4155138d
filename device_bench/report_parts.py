"""What the figures of the report share: their parts, their numbers, the colour of a variant."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from device_bench.compare import label
from device_bench.figures import Row, device_label
from device_bench.result import BenchResult
from device_bench.svg import Series

# A variant keeps its colour in every figure and every report; what is not here takes the last ones.
_COLOURS = {"QKV": "c0", "Q-K=V": "c1", "Q-MQA": "c2", "Q=K-V": "c4", "Q=K=V": "c5", "MQA": "c6"}
_OTHERS = ("c3", "c7", "c4", "c5", "c6")
Cells = list[list[object]]


@dataclasses.dataclass(frozen=True)
class Section:
    """key: the figure's id. lede: what it says; note: how to read it. legend: (class, kind, text)."""

    key: str
    title: str
    lede: str
    svg: str
    legend: list[tuple[str, str, str]]
    columns: list[str]
    rows: Cells
    sample_columns: list[str]
    samples: Cells
    note: str = ""


def count(value: float) -> str:
    """1234.6 -> ``1,235``; below 100 with up to two decimals."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figure(value: float) -> str:
    """The same for a column of a table: 11.0 below 11.5."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def times(ratio: float) -> str:
    return f"{ratio:.3g}\N{MULTIPLICATION SIGN}"


def colours_of(rows: Sequence[Row]) -> dict[str, str]:
    unknown = sorted({r.variant for r in rows} - set(_COLOURS))
    return _COLOURS | dict(zip(unknown, itertools.cycle(_OTHERS), strict=False))


def plural(n: int, one: str, many: str = "") -> str:
    """``1 sweep``, ``2 sweeps``, ``1,024 tokens``."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + [*words[-1:]])


def in_order(rows: Sequence[Row]) -> list[Row]:
    """As every figure has them: by backend, the most bytes per token first, QKV before its equals."""
    return sorted(rows, key=lambda r: (r.backend, -r.formula, r.variant != "QKV"))


def read(results: Sequence[BenchResult]) -> list[BenchResult]:
    """A line for each bundle, device and driver whose slopes have points: all of them have the same."""
    found: dict[tuple[str, str, str], BenchResult] = {}
    for r in results:
        if r.cache.bytes_per_token.points:
            found.setdefault(ran(r), r)
    return list(found.values())


def ran(r: BenchResult) -> tuple[str, str, str]:
    """What a Row calls sha256, device and driver."""
    return (r.artifact.sha256, device_label(r.device), r.conditions.engine)


def names(rows: Sequence[Row]) -> dict[Row, str]:
    """What a figure calls a row: its label, its bundle's name and device where two share a label,
    and why it is not what it looks like."""
    bundles = {(label(r), r.sha256): r for r in rows}
    shared = Counter(who for who, _ in bundles)
    several = len({r.device for r in rows}) > 1
    return {
        r: label(r)
        + f" {r.name}" * (shared[label(r)] > 1)
        + f", {r.device.split(',')[0]}" * several
        + marked(r)
        for r in rows
    }


def marked(row: Row) -> str:
    """Why a row is not what it looks like."""
    marks = [
        word for word, on in (("interpreted", row.interpreted), ("emulated", row.emulated)) if on
    ]
    return f" ({', '.join(marks)})" if marks else ""


def legend(rows: Sequence[Row], colours: dict[str, str]) -> list[tuple[str, str, str]]:
    variants = sorted({(-r.formula, r.variant != "QKV", r.variant) for r in rows})
    return [(colours[v], "box", v) for v in dict.fromkeys(v for _, _, v in variants)]


def line_legend(series: Sequence[Series], dotted: str) -> list[tuple[str, str, str]]:
    """What the lines of a chart mean, those that are drawn."""
    drawn = {s.line for s in series if s.marks}
    known = (
        ("solid", "one tensor per layer"),
        ("dashed", "two tensors per layer"),
        ("dotted", dotted),
    )
    return [("", kind, text) for kind, text in known if kind in drawn]
