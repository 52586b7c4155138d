"""Charts of one row a bundle, as inline SVG: its name and its numbers over a bar, or over a dot.

Name and numbers share a line where all rows of the chart have room for both, else they take their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

from device_bench.svg import (
    Axis,
    Mark,
    across,
    fitted,
    line,
    svg,
    text,
    text_width,
    title,
    whisker,
)

_SIZE, _LEADING, _THICK = 13, 17, 13


@dataclasses.dataclass(frozen=True)
class Bar:
    """parts: (size, css class, what pointing shows); tick: where another figure says that the first
    part should end."""

    label: str
    value: str
    parts: Sequence[tuple[float, str, str]]
    tick: float | None = None
    hollow: bool = False


@dataclasses.dataclass(frozen=True)
class Dot:
    """css: the class that gives the colour; mark: x is what is drawn, y is not; bound: what x cannot exceed."""

    label: str
    value: str
    css: str
    mark: Mark
    bound: float | None = None


def bars(rows: Sequence[Bar], width: int, *, label: str) -> str:
    """One horizontal bar under the other, all on one scale from zero."""
    most = max((max(sum(p[0] for p in r.parts), r.tick or 0) for r in rows), default=0) or 1
    out, tops, height = _heads(rows, width)
    for row, top in zip(rows, tops, strict=True):
        out.append(_track(top, width))
        at = 0.0
        for size, css, words in row.parts:
            wide = max(0.0, size) / most * width
            shape = f'x="{at:.1f}" y="{top}" width="{wide:.1f}" height="{_THICK}"'
            kind = "mark bar hollow" if row.hollow else "mark bar"
            out.append(
                f'<g class="{escape(css)}"><rect class="{kind}" {shape}>{title(words)}</rect></g>'
            )
            at += wide
        if row.tick is not None:
            tick = min(width - 1.0, row.tick / most * width)
            out.append(line(tick, top - 3, tick, top + _THICK + 3, "formula"))
    return svg(width, height, label, out)


def dots(rows: Sequence[Dot], axis: Axis, width: int, *, label: str) -> str:
    """One dot under the other with its interval, and a dotted tick at its bound."""
    out, tops, height = _heads(rows, width)
    x0, x1 = 8.0, width - 8.0  # for an arrow at either end
    for row, top in zip(rows, tops, strict=True):
        out.append(_track(top, width))
        for value, _ in axis.ticks:
            at = axis.place(value, x0, x1)
            out.append(line(at, top, at, top + _THICK, "grid"))
        middle = top + _THICK / 2
        out.append(f'<g class="{escape(row.css)}">')
        if row.bound is not None:
            at = axis.place(row.bound, x0, x1)
            out.append(line(at, top - 3, at, top + _THICK + 3, "mark bound"))
        out.append("<g>" + title(row.mark.text))
        out += whisker(row.mark, axis, x0, x1, middle, upright=False)
        at = axis.place(row.mark.x, x0, x1)
        out.append(f'<circle class="mark dot" cx="{at:.1f}" cy="{middle}" r="4.5"/></g></g>')
    out += across(axis, x0, x1, height - 8, width)
    return svg(width, height + 36, label, out)


def _heads(rows: Sequence[Bar] | Sequence[Dot], width: int) -> tuple[list[str], list[int], int]:
    """(the texts over every row, where each row's track begins, the height of all)."""
    one_line = all(
        text_width(r.label, _SIZE) + text_width(r.value, _SIZE, bold=True) + 16 <= width
        for r in rows
    )
    out: list[str] = []
    tops, y = [], 0
    for r in rows:
        if one_line:
            out.append(text(0, y + 13, r.label, "name"))
            out.append(text(width, y + 13, r.value, "value", "end"))
        else:
            lines = [(each, "name") for each in _wrapped(r.label, width)]
            lines += [(each, "value") for each in _wrapped(r.value, width / 1.1)]
            for each, css in lines:
                out.append(text(0, y + 13, each, css))
                y += _LEADING
            y -= _LEADING
        tops.append(y + 21)
        y += 48
    return out, tops, max(y, 1)


def _wrapped(words: str, width: float, most: int = 3) -> list[str]:
    """Lines that have room, broken at spaces; the last of ``most`` ends where its room does."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if len(lines) < most and lines[-1] and text_width(longer, _SIZE) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [fitted(each, width, _SIZE) for each in lines]


def _track(top: int, width: int) -> str:
    return f'<rect class="track" x="0" y="{top}" width="{width}" height="{_THICK}"/>'
