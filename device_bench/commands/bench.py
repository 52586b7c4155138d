"""``edgeqkv bench``: latency and memory of bundles, a fresh process per configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from device_bench.devices import Transport
    from device_bench.result import BenchResult
    from device_bench.sweep import Bundle
    from device_bench.workload import Workload


def run(
    bundles: Annotated[
        list[Path] | None,
        typer.Argument(metavar="BUNDLE...", help="Also MODEL_DIRs, with --baseline-tool."),
    ] = None,
    n_prompt: Annotated[str, typer.Option("-p", "--n-prompt", help="Tokens to prefill.")] = "128",
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", help="Tokens to decode.")] = "32",
    pairs: Annotated[
        list[str] | None,
        typer.Option("-pg", metavar="P,N", help="Prefill P, then decode N; repeatable."),
    ] = None,
    n_depth: Annotated[str, typer.Option("-d", "--n-depth", help="Context held before.")] = "0",
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1)] = 5,
    threads: Annotated[str, typer.Option("-t", "--threads")] = "1",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="FILE.jsonl, a line as each finishes.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds a process may take.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Skip what -o FILE holds already.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace -o FILE.")] = False,
    memory: Annotated[bool, typer.Option(help="Measure memory, in processes of its own.")] = True,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of order and tokens. [default: drawn]")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="Where to run: local; repeatable. [default: local]"),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="What drives the runtime. [default: the device's own]")
    ] = None,
    baseline_tool: Annotated[
        str | None,
        typer.Option(help="optimum, gguf: what each MODEL_DIR costs there, as three projections."),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Measure a runtime of known figures instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure bundles. -p -n -d -t take lists and ranges: 0,512  128-512+128  64-512*2.

    A configuration that fails becomes a line with its reason, and the sweep goes on. Exits with
    status 5 when a measurement contradicts the formula or the artifact, 1 when nothing succeeded.

    Example: edgeqkv bench OUT/onnx OUT/executorch -p 128 -n 32 -d 0,512 -r 5 -t 1,2 -o results.jsonl
    """
    import secrets
    import tempfile

    from device_bench.baselines import resolve, write_baselines
    from device_bench.devices import open_transports
    from device_bench.sweep import open_bundle
    from device_bench.workload import expand, parse_counts, parse_pair
    from edgeqkv.errors import UsageError

    seed = secrets.randbits(31) if seed is None else seed
    if self_test:
        _self_test(seed, timeout, as_json)
        return
    if not bundles:
        raise UsageError("no bundle given; name one or more, or give --self-test")
    sources = resolve(bundles, baseline_tool)
    plan = expand(
        parse_counts(n_prompt, "-p"),
        parse_counts(n_gen, "-n"),
        parse_counts(n_depth, "-d"),
        parse_counts(threads, "-t", low=1),
        repetitions=repetitions,
        seed=seed,
        bundles=len(sources),
        pairs=[parse_pair(text) for text in pairs or []],
    )
    earlier = _prepare(output, resume, overwrite)
    with tempfile.TemporaryDirectory(prefix="edgeqkv-baseline-") as folder:
        opened = [open_bundle(path) for path in write_baselines(sources, Path(folder))]
        devices = open_transports(device or ["local"], engine)
        results = _sweep(devices, opened, plan, output, earlier, memory, timeout)
    _report(results, as_json)


def _prepare(output: Path | None, resume: bool, overwrite: bool) -> list[BenchResult]:
    """Check -o before hours are spent; the results it holds when resuming."""
    from device_bench.result import cut_partial_line, read_results
    from edgeqkv.console import note
    from edgeqkv.errors import UsageError

    if output is None:
        if resume:
            raise UsageError("--resume needs -o FILE.jsonl, the file to go on with")
        return []
    if output.suffix != ".jsonl":
        raise UsageError(
            f"-o is {output}; it must end in .jsonl (`edgeqkv compare` makes Markdown and CSV of it)"
        )
    earlier: list[BenchResult] = []
    if output.exists() and output.stat().st_size and not overwrite:
        if not resume:
            raise UsageError(f"{output} exists; give --resume to go on with it, or --overwrite")
        earlier, warning = read_results(output)
        if warning:
            note(warning)
            cut_partial_line(output)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(b"")
    return earlier


def _sweep(
    devices: list[Transport],
    bundles: list[Bundle],
    plan: list[tuple[int, Workload]],
    output: Path | None,
    earlier: list[BenchResult],
    memory: bool,
    timeout: float | None,
) -> list[BenchResult]:
    """Run what is missing; the results of the plan, earlier ones included."""
    import uuid

    from device_bench.result import append_result
    from device_bench.sweep import run_sweep
    from edgeqkv.console import note, progress

    machines = [(d.describe(), d.engine) for d in devices]
    planned = {
        (bundles[i].sha256, *w.sizes, m.kind, m.id, engine)
        for i, w in plan
        for m, engine in machines
    }
    results = [r for r in earlier if r.configuration in planned]
    run_id = uuid.uuid4().hex[:12]
    with progress(len(planned) - len(results), "bench") as advance:

        def finished(result: BenchResult) -> None:
            results.append(result)
            if output is not None:
                append_result(output, result)
            threads = f"{result.workload.n_threads} thread{'s' * (result.workload.n_threads > 1)}"
            name = f"{result.artifact.backend} {result.model.label} {result.cache.layout}"
            outcome = "" if result.status == "ok" else f": {result.status}: {result.reason}"
            advance(f"{name} {result.workload.label}, {threads}{outcome}")

        try:
            for device in devices:
                run_sweep(
                    device,
                    bundles,
                    plan,
                    run_id=run_id,
                    with_memory=memory,
                    timeout_s=timeout,
                    earlier=earlier,
                    finished=finished,
                )
        except KeyboardInterrupt:
            if output is not None:
                note(f"{len(results)} of {len(planned)} are in {output}; go on with --resume")
            raise
        finally:
            for device in devices:
                device.close()
    return results


def _report(results: list[BenchResult], as_json: bool) -> None:
    from device_bench.table import print_results
    from edgeqkv.console import print_json
    from edgeqkv.errors import EXIT_ERROR, EXIT_INVALID

    if as_json:
        print_json([r.to_dict() for r in results])
    else:
        print_results(results)
    if any(r.status == "invalid" for r in results):
        raise typer.Exit(EXIT_INVALID)
    if all(r.status == "failed" for r in results):
        raise typer.Exit(EXIT_ERROR)


def _self_test(seed: int, timeout: float | None, as_json: bool) -> None:
    import dataclasses
    import tempfile

    from device_bench import self_test
    from device_bench.devices import open_transports
    from device_bench.sweep import open_bundle
    from device_bench.workload import expand
    from edgeqkv.console import print_json, print_table
    from edgeqkv.errors import EXIT_INVALID

    with tempfile.TemporaryDirectory(prefix="edgeqkv-self-test-") as folder:
        modes = ("growing", "static")
        opened = [open_bundle(self_test.write_bundle(Path(folder, m), m)) for m in modes]
        plan = expand([128], [32], [0], [1], repetitions=15, seed=seed, bundles=2)
        results = _sweep(open_transports(["local"], None), opened, plan, None, [], True, timeout)
        checks = self_test.check_results(results)
    if as_json:
        print_json([{**dataclasses.asdict(c), "passed": c.passed} for c in checks])
    else:
        rows = [
            [
                c.figure,
                c.known,
                c.reported,
                round(c.allowed),
                c.unit,
                "ok" if c.passed else "FAILED",
            ]
            for c in checks
        ]
        print_table(["figure", "known", "reported", "allowed +-", "unit", ""], rows)
    if not all(c.passed for c in checks):
        raise typer.Exit(EXIT_INVALID)
