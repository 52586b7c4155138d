"""``edgeqkv bench``: latency and memory of bundles, a fresh process per configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from device_bench.bundles import Bundle
    from device_bench.conditions import Bandwidth
    from device_bench.devices import DeviceLost, Transport
    from device_bench.result import BenchResult
    from device_bench.stability import Limits
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
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", min=1, help="In each process.")
    ] = 3,
    processes: Annotated[
        int,
        typer.Option(min=1, help="Of each configuration; intervals are over processes."),
    ] = 3,
    threads: Annotated[
        str | None,
        typer.Option("-t", "--threads", help="(default: 1, in a browser also its cores up to 4)"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help=".jsonl: a line as each process finishes, nothing is lost. .md, .csv, .json: written whole at the end.",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds a process may take. (default: none)")
    ] = None,
    max_cv: Annotated[
        str | None,
        typer.Option(metavar="5%", help="Run a process again whose repetitions vary by more."),
    ] = None,
    max_temp_c: Annotated[
        float | None,
        typer.Option("--max-temp-c", help="Wait until cooler; run again what got hotter."),
    ] = None,
    cooldown: Annotated[float, typer.Option(min=0, help="Seconds of rest before a process.")] = 0,
    resume: Annotated[
        bool, typer.Option(help="Skip what -o FILE holds, but for what failed.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace -o FILE.")] = False,
    memory: Annotated[bool, typer.Option(help="Measure memory, in processes of its own.")] = True,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of order and tokens. (default: drawn)")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="local|adb[:SERIAL]|browser[:HOW]|qemu[:CPU]",
            help="Where to run; repeatable. (default: local)",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="python|native",
            help="What drives the runtime here: native is C, without Python in the process.",
        ),
    ] = None,
    cores: Annotated[
        str | None,
        typer.Option(metavar="4-7", help="CPUs to run on, such as a phone's big cores."),
    ] = None,
    baseline_tool: Annotated[
        str | None,
        typer.Option(
            help="optimum, genai, gguf, gguf:q8_0, gguf:q4_0: what each MODEL_DIR costs there."
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Measure a runtime of known figures instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure bundles. -p -n -d -t take lists and ranges: 0,512  128-512+128  64-512*2.

    A configuration that fails becomes a line with its reason, and the sweep goes on. Exits with
    status 5 when a measurement contradicts the formula or the artifact, 1 when nothing succeeded.
    Results go to stdout, progress to stderr. Three runs that break --max-cv or --max-temp-c leave a
    line marked unstable.

    Example: edgeqkv bench OUT/onnx OUT/executorch -p 128 -n 32 -d 0,512 -r 5 -t 1,2 -o results.jsonl
    """
    import contextlib
    import functools
    import os
    import secrets
    import tempfile

    from device_bench.baselines import resolve, write_baselines
    from device_bench.bundles import open_bundle
    from device_bench.devices import check_threads, open_transports, threads_of
    from device_bench.output import prepared
    from device_bench.stability import Limits, parse_share
    from device_bench.sweep import without_repeats
    from device_bench.workload import expand, parse_counts, parse_pair
    from edgeqkv.errors import UsageError

    seed = secrets.randbits(31) if seed is None else seed
    if self_test:
        _self_test(seed, timeout, as_json)
        return
    if not bundles:
        raise UsageError("no bundle given; name one or more, or give --self-test")
    limits = Limits(parse_share(max_cv, "--max-cv") if max_cv else None, max_temp_c, cooldown)
    if limits.max_cv is not None and repetitions < 2:
        raise UsageError("--max-cv needs 2 repetitions or more in a process; give -r 3")
    sources = resolve(bundles, baseline_tool)
    plan_with = functools.partial(
        expand,
        parse_counts(n_prompt, "-p"),
        parse_counts(n_gen, "-n"),
        parse_counts(n_depth, "-d"),
        repetitions=repetitions,
        seed=seed,
        bundles=len(sources),
        processes=processes,
        pairs=[parse_pair(text) for text in pairs or []],
    )
    asked = parse_counts(threads, "-t", low=1) if threads is not None else None
    plan_with(asked or [1])  # what is wrong with it is said before a device is opened
    names = device or ["local"]
    if asked and "local" in names:
        check_threads(asked, "local", os.cpu_count())
    with contextlib.ExitStack() as stack:
        earlier = stack.enter_context(prepared(output, resume, overwrite))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeqkv-baseline-"))
        opened = [open_bundle(path) for path in write_baselines(sources, Path(folder))]
        pinned = parse_counts(cores, "--cores") if cores else []
        devices = open_transports(names, engine, pinned)
        for each in devices:
            stack.callback(each.close)
        plans = [without_repeats(opened, plan_with(threads_of(d, asked))) for d in devices]
        results, lost = _sweep(devices, opened, plans, output, earlier, memory, timeout, limits)
    if results or not lost:
        _report(results, as_json)
    if lost:  # said last, and with an exit status: some lines are missing
        raise lost[0]


def _sweep(
    devices: list[Transport],
    bundles: list[Bundle],
    plans: list[list[tuple[int, Workload]]],
    output: Path | None,
    earlier: list[BenchResult],
    memory: bool,
    timeout: float | None,
    limits: Limits,
) -> tuple[list[BenchResult], list[DeviceLost]]:
    """Run what is missing of each device's plan; its results, earlier ones included, and what was
    lost."""
    import threading
    import uuid

    from device_bench.devices import run_each
    from device_bench.output import render, write_whole
    from device_bench.result import append_result
    from device_bench.sweep import by_completeness, run_sweep
    from device_bench.table import describe
    from edgeqkv.console import note, progress

    machines = [(d.describe(), d.engine) for d in devices]
    planned = {
        (bundles[i].sha256, *w.sizes, m.kind, m.id, engine)
        for (m, engine), plan in zip(machines, plans, strict=True)
        for i, w in plan
    }
    lines = output is not None and output.suffix == ".jsonl"
    if output is not None and lines and not earlier:
        output.write_bytes(b"")
    earlier, again = by_completeness(earlier, planned, memory)
    if again:
        note(again)
    results = [r for r in earlier if r.configuration in planned]
    run_id = uuid.uuid4().hex[:12]
    local = [
        w
        for (m, _), plan in zip(machines, plans, strict=True)
        for i, w in plan
        if m.kind == "local" and not w.misfit(bundles[i].artifact.cache.capacity)
    ]
    bandwidth = _bandwidth(local) if local and len(results) < len(planned) else None
    with progress(len(planned) - len(results), "bench") as advance:
        one_at_a_time = threading.Lock()

        def finished(result: BenchResult) -> None:
            with one_at_a_time:
                results.append(result)
                if output is not None and lines:
                    append_result(output, result)
            outcome = "" if result.status == "ok" else f": {result.status}: {result.reason}"
            advance(describe(result) + outcome)

        def sweep(device: Transport) -> None:
            run_sweep(
                device,
                bundles,
                plans[devices.index(device)],
                run_id=run_id,
                with_memory=memory,
                timeout_s=timeout,
                limits=limits,
                bandwidth=bandwidth if device.describe().kind == "local" else None,
                earlier=earlier,
                finished=finished,
            )

        try:
            _check_thermometers(devices, limits)
            lost = run_each(devices, sweep)
        except KeyboardInterrupt:
            if output is not None and results:
                go_on = "; go on with --resume" if lines else ""
                note(f"{len(results)} of {len(planned)} are in {output}{go_on}")
            raise
        finally:
            if output is not None and not lines and results:
                write_whole(output, render(results, output.suffix))
    for each in lost:
        note(f"lost: {each}" + ("; go on with --resume" if lines else ""))
    return results, lost


def _check_thermometers(devices: list[Transport], limits: Limits) -> None:
    from edgeqkv.errors import UsageError

    if limits.max_temp_c is not None:
        for device in devices:
            if device.conditions(1).temperature_c is None:
                raise UsageError(
                    f"--max-temp-c: {device.describe().kind} lets nobody read its temperature; "
                    "use --cooldown"
                )


def _bandwidth(plan: list[Workload]) -> tuple[Bandwidth, ...] | None:
    """How fast this machine reads memory, with as many threads as will decode; None if none will."""
    import os

    from device_bench.conditions import Bandwidth
    from device_bench.jobs import JobFailed, run_job
    from device_bench.schema import build

    threads = sorted({1, os.cpu_count() or 1, *(w.n_threads for w in plan if w.n_gen)})
    if not any(w.n_gen for w in plan):
        return None
    try:
        rows = run_job({"pass": "bandwidth", "threads": threads}, timeout_s=60)
    except JobFailed:
        return None
    return tuple(build(Bandwidth, row, "bandwidth") for row in rows)


def _report(results: list[BenchResult], as_json: bool) -> None:
    from device_bench.table import print_results, problems
    from edgeqkv.console import print_json
    from edgeqkv.errors import EXIT_ERROR, EXIT_INVALID

    nothing = all(r.status == "failed" for r in results)
    if as_json:
        print_json([r.to_dict() for r in results])
    elif nothing:  # a table of dashes would say no more
        print(*problems(results), sep="\n")
    else:
        print_results(results)
    if any(r.status == "invalid" for r in results):
        raise typer.Exit(EXIT_INVALID)
    if nothing:
        raise typer.Exit(EXIT_ERROR)


def _self_test(seed: int, timeout: float | None, as_json: bool) -> None:
    import dataclasses
    import tempfile

    from device_bench import self_test
    from device_bench.bundles import open_bundle
    from device_bench.devices import open_transports
    from device_bench.stability import Limits
    from device_bench.workload import expand
    from edgeqkv.console import print_json, print_table
    from edgeqkv.errors import EXIT_INVALID

    with tempfile.TemporaryDirectory(prefix="edgeqkv-self-test-") as folder:
        modes = ("growing", "static")
        opened = [open_bundle(self_test.write_bundle(Path(folder, m), m)) for m in modes]
        plan = expand([128], [32], [0], [1], repetitions=15, seed=seed, bundles=2)
        here = open_transports(["local"], None)
        results, _ = _sweep(here, opened, [plan], None, [], True, timeout, Limits())
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
