"""Result lines for tests: real ones of the self-test model, changed where a test says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from device_bench import sweep
from device_bench.conditions import conditions
from device_bench.result import BenchResult, MemoryPoint, Samples
from device_bench.self_test import write_bundle
from device_bench.workload import Workload


def result(folder: Path, cache_mode: str = "growing", **changes: object) -> BenchResult:
    """A line as the sweep assembles it, without running anything; ``changes`` replace fields."""
    if not folder.exists():
        write_bundle(folder, cache_mode)
    bundle = sweep.open_bundle(folder)
    line = sweep.assemble(
        bundle,
        Workload(128, 0, 0, 1, 5, 1, 42, 0),
        sweep.Outcome(engine="self-test", interpreted=False, samples=SAMPLES),
        state=conditions(1),
        figures=sweep.with_slopes(
            sweep.BytesPerToken(sweep.formula(bundle.artifact), declared=8192), "depth", POINTS
        ),
        run_id="test",
    )
    return dataclasses.replace(line, **changes)


SAMPLES = Samples(None, 5_000_000, 60_000, (130_000,), ((128_000,), (127_000,), (129_000,)))
POINTS = [MemoryPoint(128 * i, 8192 * 128 * i, 9216 * 128 * i + 5_000_000) for i in range(1, 9)]
