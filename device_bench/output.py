"""Files by their suffix, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from device_bench.result import BenchResult, cut_partial_line, naming, read_results
from device_bench.table import markdown, to_csv
from edgeqkv.console import note
from edgeqkv.errors import UsageError


def check_suffix(path: Path, allowed: Sequence[str]) -> None:
    """Raises UsageError before any work is done for a file that could not be written."""
    if path == Path():  # also what an empty text is
        raise UsageError(f"-o names no file; give one that ends in {', '.join(allowed)}")
    if path.suffix not in allowed:
        raise UsageError(f"-o is {path}; it must end in {', '.join(allowed)}")
    if path.is_dir():
        raise UsageError(f"-o is {path}, which is a folder; name a file in it")
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise UsageError(f"-o is {path}, but {parent} is a file; choose another folder")


@contextlib.contextmanager
def prepared(output: Path | None, resume: bool, overwrite: bool) -> Iterator[list[BenchResult]]:
    """Check -o before hours are spent; yields the results it holds when resuming.

    A .jsonl file that was made here is removed at the end if it holds nothing. What ``overwrite``
    replaces stays until the sweep begins: nothing is lost to a bundle that cannot be opened.
    """
    if output is None:
        if resume:
            raise UsageError("--resume needs -o FILE.jsonl, the file to go on with")
        yield []
        return
    check_suffix(output, (".jsonl", ".json", ".csv", ".md"))
    if resume and output.suffix != ".jsonl":
        raise UsageError(f"--resume needs -o FILE.jsonl, -o is {output}")
    holds_some = output.exists() and output.stat().st_size > 0
    if holds_some and not overwrite:
        if not resume:
            go_on = "--resume to go on with it, or " if output.suffix == ".jsonl" else ""
            raise UsageError(f"{output} exists; give {go_on}--overwrite")
        earlier, warning = read_results(output)
        if warning:
            note(warning)
            cut_partial_line(output)
        yield earlier
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    ours = output.suffix == ".jsonl" and (overwrite or not output.exists())
    if output.suffix == ".jsonl":
        output.open("ab").close()
    try:
        yield []
    finally:
        if ours and output.is_file() and output.stat().st_size == 0:
            output.resolve().unlink()


def render(results: Sequence[BenchResult], suffix: str) -> str:
    """Results as .md tables, .csv rows or a .json list of everything measured."""
    if suffix == ".md":
        return markdown(results) + "\n"
    if suffix == ".csv":
        return to_csv(results)
    return json.dumps([r.to_dict() for r in results], indent=2, allow_nan=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` in one step, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming(path), partial.open("w", encoding="utf-8", newline="\n") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
