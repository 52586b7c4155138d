"""Charts as inline SVG text: no library, no script, colours from the page's CSS variables.

Sizes are CSS pixels at the width they are drawn for; a page holds each chart once for a desktop and
once for a phone, so that letters keep their size. Every text is escaped here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from html import escape

WIDE, NARROW = 760, 340
_TOP, _BOTTOM, _RIGHT = 14, 44, 14


@dataclasses.dataclass(frozen=True)
class Mark:
    """A point; low and high: an interval drawn through it; text: what pointing at it shows."""

    x: float
    y: float
    text: str
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """css: the class that gives the colour. line: solid, dashed, dotted, or none between marks."""

    name: str
    css: str
    marks: Sequence[Mark]
    line: str = "solid"
    dots: bool = True


@dataclasses.dataclass(frozen=True)
class Axis:
    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        """Where ``value`` lies between the pixels of low and high."""
        a, b, v = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            a, b, v = math.log(a), math.log(b), math.log(v)
        return start + (end - start) * ((v - a) / (b - a) if b > a else 0.5)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A horizontal line across the chart, such as a device's memory."""

    y: float
    label: str


@dataclasses.dataclass(frozen=True)
class Bar:
    """label over the bar, value at its right end; parts: (size, css class, what pointing shows);
    tick: where another figure says that the first part should end."""

    label: str
    value: str
    parts: Sequence[tuple[float, str, str]]
    tick: float | None = None
    hollow: bool = False


def both(draw: Callable[[int], str]) -> str:
    """A chart for a desktop and for a phone; CSS shows one."""
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


def linear_axis(title: str, low: float, high: float, show: Callable[[float], str]) -> Axis:
    """Ticks at 1, 2 or 5 times a power of ten, four to seven of them, ends included."""
    span = (high - low) or abs(high) or 1.0
    raw = 10 ** math.floor(math.log10(span / 4))
    step = next(raw * m for m in (1, 2, 5, 10) if span / (raw * m) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    values = [i * step for i in range(first, last + 1)]
    return Axis(title, values[0], values[-1], [(v, show(v)) for v in values])


def log_axis(
    title: str, low: float, high: float, show: Callable[[float], str], base: int = 10
) -> Axis:
    """Ticks at powers of ``base`` (for 10 also 2 and 5 times them where that makes few)."""
    first, last = (f(math.log(v, base)) for f, v in ((math.floor, low), (math.ceil, high)))
    steps = (1, 2, 5) if base == 10 and last - first <= 3 else (1,)
    values = [m * float(base) ** e for e in range(first, last + 1) for m in steps]
    inside = [v for v in values if low / 1.001 <= v <= high * 1.001]
    return Axis(title, low, high, [(v, show(v)) for v in inside], log=True)


def chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    width: int,
    *,
    label: str,
    height: int = 320,
    rules: Sequence[Rule] = (),
) -> str:
    """Lines and points over two axes."""
    left = 14 + 7 * max((len(t) for _, t in y.ticks), default=1)
    x0, x1, y0, y1 = left, width - _RIGHT, height - _BOTTOM, _TOP + 14
    out = [_text(0, 11, y.title, "axis")]
    for value, name in y.ticks:
        at = y.place(value, y0, y1)
        out.append(_line(x0, at, x1, at, "grid"))
        out.append(_text(x0 - 6, at + 4, name, "tick", "end"))
    for value, name in _thinned(x.ticks, lambda v: x.place(v, x0, x1)):
        at = x.place(value, x0, x1)
        out.append(_line(at, y0, at, y0 + 4, "stem"))
        out.append(_text(at, y0 + 17, name, "tick", "middle"))
    out.append(_text((x0 + x1) / 2, height - 6, x.title, "axis", "middle"))
    for rule in rules:
        at = y.place(rule.y, y0, y1)
        out.append(_line(x0, at, x1, at, "rule"))
        out.append(_text(x0 + 5, at - 5, rule.label, "rule-name"))
    for each in series:
        points = [(x.place(m.x, x0, x1), y.place(m.y, y0, y1), m) for m in each.marks]
        out.append(f'<g class="{escape(each.css)}">')
        if each.line != "none" and len(points) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
            out.append(f'<polyline class="mark {each.line}" points="{path}"/>')
        for px, py, mark in points if each.dots else []:
            out.append("<g>" + _title(mark.text))
            if mark.low is not None and mark.high is not None:
                ends = (y.place(v, y0, y1) for v in (mark.low, mark.high))
                out.append(_line(px, next(ends), px, next(ends), "mark whisker"))
            out.append(f'<circle class="mark dot" cx="{px:.1f}" cy="{py:.1f}" r="4"/></g>')
        out.append("</g>")
    return _svg(width, height, label, out)


def bars(rows: Sequence[Bar], width: int, *, label: str) -> str:
    """One horizontal bar under the other, all on one scale from zero."""
    most = max((max(sum(p[0] for p in r.parts), r.tick or 0) for r in rows), default=0) or 1
    out, pitch, thick = [], 46, 13
    for i, row in enumerate(rows):
        top = i * pitch
        out.append(_text(0, top + 13, row.label, "name"))
        out.append(_text(width, top + 13, row.value, "value", "end"))
        out.append(f'<rect class="track" x="0" y="{top + 20}" width="{width}" height="{thick}"/>')
        at = 0.0
        for size, css, title in row.parts:
            wide = max(0.0, size) / most * width
            shape = f'x="{at:.1f}" y="{top + 20}" width="{wide:.1f}" height="{thick}"'
            kind = "mark bar hollow" if row.hollow else "mark bar"
            out.append(
                f'<g class="{escape(css)}"><rect class="{kind}" {shape}>{_title(title)}</rect></g>'
            )
            at += wide
        if row.tick is not None:
            tick = min(width - 1.0, row.tick / most * width)
            out.append(_line(tick, top + 16, tick, top + 20 + thick + 4, "formula"))
    return _svg(width, max(1, len(rows)) * pitch, label, out)


def _thinned(
    ticks: Sequence[tuple[float, str]], place: Callable[[float], float]
) -> Sequence[tuple[float, str]]:
    """Every tick, or every second, third ...: the first of these whose names have room."""
    for step in range(1, len(ticks) + 1):
        kept = ticks[::step]
        pairs = itertools.pairwise(kept)
        if all(
            place(b) - place(a) > 3.6 * (len(name) + len(after)) + 8
            for (a, name), (b, after) in pairs
        ):
            return kept
    return ticks[:1]


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, css: str, anchor: str = "start") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{css}" {where}>{escape(text)}</text>'


def _line(x0: float, y0: float, x1: float, y1: float, css: str) -> str:
    return f'<line class="{css}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"
