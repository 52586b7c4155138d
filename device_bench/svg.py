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
Point = tuple[float, float]
_TOP, _BOTTOM, _RIGHT = 36, 44, 14


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
    """css: the class that gives the colour. line: solid, dashed, dotted, or none between marks.
    shift: pixels to the right, so that the intervals of several series at one x are told apart."""

    name: str
    css: str
    marks: Sequence[Mark]
    line: str = "solid"
    dots: bool = True
    shift: float = 0


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
    if len(inside) < 3:  # less than a decade: round steps say more
        inside = [v for v, _ in linear_axis("", low, high, show).ticks if low <= v <= high]
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
    x0 = 10 + max((text_width(t, 12) for _, t in y.ticks), default=1)
    x1, y0, y1 = width - _RIGHT, height - _BOTTOM, _TOP
    out = [text(0, 11, y.title, "axis")]
    for value, name in y.ticks:
        at = y.place(value, y0, y1)
        out.append(line(x0, at, x1, at, "grid"))
        out.append(text(x0 - 6, at + 4, name, "tick", "end"))
    out += across(x, x0, x1, y0, width)
    taken: list[tuple[float, float]] = []  # a rule's name goes right of one that is as high
    for rule in sorted(rules, key=lambda r: r.y):
        at = y.place(rule.y, y0, y1)
        start = max([x0 + 5, *(end + 12 for other, end in taken if abs(other - at) < 15)])
        name = fitted(rule.label, x1 - start, 11.5)
        taken.append((at, start + text_width(name, 11.5)))
        out.append(line(x0, at, x1, at, "rule"))
        out.append(text(start, at - 5, name, "rule-name"))
    for each in series:
        points = [(x.place(m.x, x0, x1) + each.shift, y.place(m.y, y0, y1), m) for m in each.marks]
        out.append(f'<g class="{escape(each.css)}">')
        if each.line != "none" and len(points) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
            out.append(f'<polyline class="mark {each.line}" points="{path}"/>')
        if each.line != "none" and len(points) == 1 and not each.dots:  # a line of one point
            ((px, py, mark),) = points
            ends = f"{px - 14:.1f},{py:.1f} {px + 14:.1f},{py:.1f}"
            shape = f'<polyline class="mark {each.line}" points="{ends}">'
            out.append(f"{shape}{title(mark.text)}</polyline>")
        for px, py, mark in points if each.dots else []:
            out.append("<g>" + title(mark.text))
            out += whisker(mark, y, y0, y1, px, upright=True)
            out.append(f'<circle class="mark dot" cx="{px:.1f}" cy="{py:.1f}" r="4"/></g>')
        out.append("</g>")
    return svg(width, height, label, out)


def whisker(
    mark: Mark, axis: Axis, start: float, end: float, at: float, *, upright: bool
) -> list[str]:
    """The interval of a mark that lies at the pixel ``at`` across the axis. An end that the axis does
    not reach is an arrow."""

    def turn(along: float, off: float) -> Point:
        return (at + off, along) if upright else (along, at + off)

    if mark.low is None or mark.high is None:
        return []
    ends = [axis.place(v, start, end) for v in (mark.low, mark.high)]
    out = [line(*turn(ends[0], 0), *turn(ends[1], 0), "mark whisker")]
    ahead = 6 if end > start else -6
    for tip, cut, way in (
        (ends[0], mark.low < axis.low, -ahead),
        (ends[1], mark.high > axis.high, ahead),
    ):
        if cut:
            corners = [turn(tip + way, 0), turn(tip - way / 3, -4), turn(tip - way / 3, 4)]
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
            out.append(f'<polygon class="mark cut" points="{path}"/>')
        else:
            out.append(line(*turn(tip, -3), *turn(tip, 3), "mark whisker"))
    return out


def across(axis: Axis, x0: float, x1: float, top: float, width: int) -> list[str]:
    """An axis under a chart: stems, names and title. Names keep inside the width."""
    out = []
    for value, name in _thinned(axis.ticks, lambda v: axis.place(v, x0, x1)):
        at, half = axis.place(value, x0, x1), text_width(name, 12) / 2
        out.append(line(at, top, at, top + 4, "stem"))
        out.append(text(min(max(at, half), width - half), top + 17, name, "tick", "middle"))
    out.append(text((x0 + x1) / 2, top + 38, axis.title, "axis", "middle"))
    return out


def text_width(words: str, size: float, *, bold: bool = False) -> float:
    """Pixels that a text takes at most: the advances of DejaVu Sans, of common fonts the widest."""
    return sum(_advance(c) for c in words) * size * (1.1 if bold else 1)


def fitted(words: str, width: float, size: float) -> str:
    """What of a text has room, with an ellipsis where that is not all; empty where nothing has."""
    if text_width(words, size) <= width:
        return words
    kept = itertools.accumulate(map(_advance, words))
    n = sum((so_far + _advance("@")) * size <= width for so_far in kept)
    return words[:n].rstrip() + "\N{HORIZONTAL ELLIPSIS}" if n else ""


def _advance(c: str) -> float:
    if c in " .,:;'|!()[]/-ijltfrI\N{NON-BREAKING HYPHEN}":
        return 0.42
    return 1.0 if c in "mwMWQ@%" or ord(c) > 0x2E7F else 0.84 if c in "=+<>±" else 0.68


def _thinned(
    ticks: Sequence[tuple[float, str]], place: Callable[[float], float]
) -> Sequence[tuple[float, str]]:
    """Every tick, or every second, third ...: the first of these whose names have room."""
    for step in range(1, len(ticks) + 1):
        kept = ticks[::step]
        pairs = itertools.pairwise(kept)
        if all(
            place(b) - place(a) > (text_width(name, 12) + text_width(after, 12)) / 2 + 8
            for (a, name), (b, after) in pairs
        ):
            return kept
    return ticks[:1]


def svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def text(x: float, y: float, words: str, css: str, anchor: str = "start") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{css}" {where}>{escape(words)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, css: str) -> str:
    return f'<line class="{css}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'


def title(words: str) -> str:
    return f"<title>{escape(words)}</title>"
