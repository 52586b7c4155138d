"""What the figures of the report share: their parts, their numbers, the colour of a variant."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from device_bench.figures import Row

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


def times(ratio: float) -> str:
    return f"{ratio:.3g}\N{MULTIPLICATION SIGN}"


def colours_of(rows: Sequence[Row]) -> dict[str, str]:
    unknown = sorted({r.variant for r in rows} - set(_COLOURS))
    return _COLOURS | dict(zip(unknown, itertools.cycle(_OTHERS), strict=False))


def marked(row: Row) -> str:
    """Why a row is not what it looks like."""
    marks = [
        word for word, on in (("interpreted", row.interpreted), ("emulated", row.emulated)) if on
    ]
    return f" ({', '.join(marks)})" if marks else ""


def legend(rows: Sequence[Row], colours: dict[str, str]) -> list[tuple[str, str, str]]:
    variants = sorted({(-r.formula, r.variant != "QKV", r.variant) for r in rows})
    return [(colours[v], "box", v) for v in dict.fromkeys(v for _, _, v in variants)]
