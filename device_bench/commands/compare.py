"""``edgeqkv compare``: results that ``bench`` wrote, side by side, against a baseline, as a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from device_bench.compare import Comparison
    from device_bench.result import BenchResult


def run(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="RESULTS.jsonl, and what `eval --json` printed."),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS|FILE",
            help="Ratios to a bundle, by words of its name, backend, variant, layout; or to the same rows of a file.",
        ),
    ] = None,
    fail_on_regression: Annotated[
        str | None,
        typer.Option(metavar="5%", help="Exit with 6 when a figure is worse by more than this."),
    ] = None,
    mixed: Annotated[
        bool, typer.Option(help="Take ratios across devices and conditions all the same.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write .html (the report), .md, .csv or .json."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace -o FILE.")] = False,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]SIZE", help="A device's memory, drawn into the report."),
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print every row, unrounded.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and ratios.")] = False,
) -> None:
    """Bytes per token by formula, declaration and measurement, speed and quality, side by side.

    A regression is a figure whose whole 95 % interval is worse than the baseline by more than the
    limit: file bytes, bytes per token, prefill and decode speed. Exit status 6 then.

    Example: edgeqkv compare results.jsonl --baseline "onnx QKV" -o report.html
    """
    from device_bench import compare, figures, table
    from device_bench.output import check_suffix
    from device_bench.stability import parse_share
    from edgeqkv.console import note, print_json
    from edgeqkv.errors import EXIT_REGRESSION, UsageError

    if as_markdown + as_csv + as_json > 1:
        raise UsageError("give one of --markdown, --csv and --json")
    if output is not None:
        check_suffix(output, (".html", ".md", ".csv", ".json"))
        if any(output.resolve() == f.resolve() for f in files):
            raise UsageError(f"-o is {output}, which is compared; choose another name")
        if output.exists() and not overwrite:
            raise UsageError(f"{output} exists; give --overwrite to replace it")
    if budget and (output is None or output.suffix != ".html"):
        raise UsageError("--budget is drawn into the report; give -o FILE.html")
    if mixed and baseline is None:
        raise UsageError("--mixed is about ratios; give --baseline NAME or FILE too")
    if fail_on_regression is not None and baseline is None:
        raise UsageError(
            "--fail-on-regression needs what to be worse than; give --baseline NAME or FILE"
        )
    limit = (
        None
        if fail_on_regression is None
        else parse_share(fail_on_regression, "--fail-on-regression")
    )
    earlier_file = Path(baseline) if baseline is not None and Path(baseline).is_file() else None
    results, earlier = _read(files, earlier_file)
    rows = figures.fold(results)
    found: list[Comparison] = []
    if earlier_file is not None:
        found = compare.against_file(rows, figures.fold(earlier))
    elif baseline is not None:
        found = compare.against_bundle(rows, baseline)
    differences = compare.mixtures([*results, *earlier])
    machines = compare.devices([*results, *earlier])
    if len(machines) > 1 and (not found or any(c.device != c.base_device for c in found)):
        differences.insert(0, f"{len(machines)} devices: {'; '.join(machines)}")
    if differences and baseline is not None and not mixed:
        raise UsageError(
            f"not comparable: {' | '.join(differences)}; give --mixed to compare all the same"
        )
    if len(machines) > 1 and not differences:
        note(f"rows of {len(machines)} devices, each against its own: {'; '.join(machines)}")
    if differences:
        note(f"warning: not comparable: {' | '.join(differences)}")
    if loads := compare.load_change(results, earlier):
        note(f"warning: {loads}")
    more = [table.comparison_table(found, limit)] if baseline is not None else []
    if output is not None:
        _write(output, results, found, limit, budget or [])
    if as_json:
        print_json(_data(results, found))
    elif as_markdown:
        print(table.markdown(results, more))
    elif as_csv:
        print(table.to_csv(results), end="")
    elif output is None or output.suffix != ".html":
        table.print_results(results, more)
    if limit is not None:
        _judge(found, limit)
        if any(c.regressed(limit) for c in found):
            raise typer.Exit(EXIT_REGRESSION)


def _read(
    files: Sequence[Path], earlier_file: Path | None
) -> tuple[list[BenchResult], list[BenchResult]]:
    """(results, those of the baseline file), with the quality that any of the files holds."""
    from device_bench.quality import attach_quality, read_quality
    from device_bench.result import read_results
    from edgeqkv.console import note
    from edgeqkv.errors import UsageError

    results: list[BenchResult] = []
    earlier: list[BenchResult] = []
    evaluations = {}
    others = [f for f in files if earlier_file is None or f.resolve() != earlier_file.resolve()]
    for path in [*others, *([earlier_file] if earlier_file else [])]:
        if (quality := read_quality(path)) is not None:
            evaluations[path] = quality
            continue
        found, warning = read_results(path)
        (earlier if path is earlier_file else results).extend(found)
        if warning:
            note(warning)
    results, again = _without_copies(results)
    if again:
        note(f"warning: {again} lines are given more than once and count once")
    if not results:
        raise UsageError(
            "no results to compare; give the RESULTS.jsonl that `edgeqkv bench -o` wrote"
        )
    joined, lost = attach_quality(results, evaluations)
    for line in lost:
        note(f"warning: {line}")
    return joined, earlier


def _without_copies(results: Sequence[BenchResult]) -> tuple[list[BenchResult], int]:
    """(results, how many were left out): a copy is no further process, and would narrow intervals."""
    import json

    once = {json.dumps(r.to_dict(), sort_keys=True): r for r in results}
    return list(once.values()), len(results) - len(once)


def _data(results: Sequence[BenchResult], found: Sequence[Comparison]) -> dict[str, object]:
    """What ``--json`` prints."""
    import dataclasses

    from device_bench import figures, ratios, table

    rows = figures.fold(results)
    return {
        "rows": [dataclasses.asdict(r) for r in rows],
        "ratios": [dataclasses.asdict(r) for r in ratios.ratios(rows, results)],
        "baseline": [dataclasses.asdict(c) for c in found],
        "problems": table.problems(results),
    }


def _write(
    path: Path,
    results: Sequence[BenchResult],
    found: Sequence[Comparison],
    limit: float | None,
    budgets: Sequence[str],
) -> None:
    import json

    from device_bench import table
    from device_bench.output import render, write_whole

    if path.suffix == ".html":
        from device_bench.report import parse_budget, report

        text = report(results, found, limit, [parse_budget(b) for b in budgets])
    elif path.suffix == ".md":
        more = [table.comparison_table(found, limit)] if found else []
        text = table.markdown(results, more) + "\n"
    elif path.suffix == ".json":
        text = json.dumps(_data(results, found), indent=2, allow_nan=False) + "\n"
    else:
        text = render(results, path.suffix)
    write_whole(path, text)


def _judge(found: Sequence[Comparison], limit: float) -> None:
    """Say on stderr what is worse, and what could not be judged for want of processes."""
    from edgeqkv.console import note

    for c in found:
        if c.regressed(limit) and c.worse_ci95 is not None:
            low, high = c.worse_ci95
            what = " ".join(part for part in (c.who, c.test, c.figure) if part)
            note(
                f"regression: {what}: {c.worse:+.1%} worse than {c.against} ({low:+.1%} to {high:+.1%})"
            )
    unknown = {c.figure for c in found if c.regressed(limit) is None and c.worse > limit}
    if unknown:
        worse = ", ".join(sorted(unknown))
        # Peak RSS is read once, in however many processes.
        more = "; more --processes give one" * bool(unknown - {"peak RSS"})
        note(
            f"warning: worse by more than the limit, not judged for want of an interval: {worse}{more}"
        )
