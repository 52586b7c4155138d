"""What every command prints with: tables to stdout, progress to stderr, JSON on request."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

LONG_WORD = 12  # characters
WIDTH = 100  # tables fit a 100-column terminal, and are the same in a file


def print_json(data: Any) -> None:
    """One JSON document on stdout; NaN is an error, an unmeasured figure is null."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    title: str | None = None,
    gap: int = 2,
) -> None:
    """A table on stdout. Cells that are None show as ``-``; columns with numbers align right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.padding = (0, 1, 0, gap - 1)
    for i, column in enumerate(columns):
        numeric = any(isinstance(r[i], (int, float)) for r in rows)
        # Where a table is too wide, cells of several words or long paths give way: no word is cut.
        words = [word for r in rows for word in str(r[i]).split()] + column.split()
        rigid = not any(" " in str(r[i]) or len(str(r[i])) > LONG_WORD for r in rows)
        table.add_column(
            column,
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=rigid,
            min_width=max((len(word) for word in words if len(word) <= LONG_WORD), default=1),
        )
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    console = Console(width=WIDTH, highlight=False, markup=False)
    with console.capture() as drawn:
        console.print(table)
    # Without the blanks that fill the last column.
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def note(message: str) -> None:
    """A line for the person, on stderr."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(total: int, what: str, *, ahead: bool = False) -> Iterator[Callable[[str], None]]:
    """A bar on stderr. Call the yielded function with what was just finished.

    On a pipe it prints one line per step instead of a bar. ``ahead``: call it with what begins
    now, for steps that differ and take long: the bar then names what it is that takes so long.
    """
    if not sys.stderr.isatty():
        done = 0

        def line(step: str) -> None:
            nonlocal done
            done += 1
            note(f"[{done}/{total}] {what}: {step}")

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, completed=-ahead)

        def advance(step: str) -> None:
            bar.update(task, advance=1, description=f"{what}: {step}")

        yield advance


def human_bytes(n: float) -> str:
    """1536 -> '1.5 KiB': binary units, because memory is what we report."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
