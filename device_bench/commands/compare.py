"""``edgeqkv compare``: the tables of results that ``bench`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    files: Annotated[list[Path], typer.Argument(metavar="RESULTS.jsonl...")],
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print every row, unrounded.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and ratios.")] = False,
) -> None:
    """Bytes per token by formula, declaration and measurement, and speed, side by side.

    Example: edgeqkv compare results.jsonl
    """
    import dataclasses

    from device_bench import figures, table
    from device_bench.result import read_results
    from edgeqkv.console import note, print_json
    from edgeqkv.errors import UsageError

    if as_markdown + as_csv + as_json > 1:
        raise UsageError("give one of --markdown, --csv and --json")
    results = []
    for path in files:
        found, warning = read_results(path)
        results += found
        if warning:
            note(warning)
    if len(devices := {r.device for r in results}) > 1:
        names = sorted({f"{d.system} {d.machine} {d.cpu_model}" for d in devices})
        note(f"warning: results of {len(devices)} machines, not comparable: {'; '.join(names)}")
    if as_json:
        rows = figures.fold(results)
        print_json(
            {
                "rows": [dataclasses.asdict(r) for r in rows],
                "ratios": [dataclasses.asdict(r) for r in figures.ratios(rows, results)],
                "problems": table.problems(results),
            }
        )
    elif as_markdown:
        print(table.markdown(results))
    elif as_csv:
        print(table.to_csv(results), end="")
    else:
        table.print_results(results)
