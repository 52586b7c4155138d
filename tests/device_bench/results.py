"""Result lines for tests: real ones of the self-test model, changed where a test says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from device_bench import slopes, sweep
from device_bench.bundles import open_bundle
from device_bench.conditions import conditions, device
from device_bench.result import BenchResult, ColdStart, MemoryPoint, Samples
from device_bench.self_test import write_bundle
from device_bench.workload import Workload

SAMPLES = Samples(None, 5_000_000, 60_000, (130_000,), ((128_000,), (127_000,), (129_000,)))
DECODE = Samples(None, 5_000_000, 60_000, (9, 10), ((500_000, 1_500_000, 2_500_000, 3_500_000),))


def result(
    folder: Path, *, layout: str = "auto", gen: int = 0, depth: int = 0, **changes: object
) -> BenchResult:
    """A line as the sweep assembles it, without running anything; ``changes`` replace fields.

    Prefill takes 128 us for 128 tokens, decode 1 ms per token; the process has 1 KiB of workspace
    per token beside its cache.
    """
    if not folder.exists():
        write_bundle(folder, "growing", layout=layout)
    bundle = open_bundle(folder)
    true = slopes.formula(bundle.artifact)
    points = [
        MemoryPoint(t, true * t, (true + 1024) * t + 5_000_000) for t in range(128, 1025, 128)
    ]
    line = sweep.assemble(
        bundle,
        Workload(0 if gen else 128, gen, depth, 1, 5, 1, 42, 0),
        sweep.Outcome(DECODE if gen else SAMPLES, "self-test", interpreted=False),
        machine=device(),
        state=dataclasses.replace(conditions(1), load_average_1m=0.1),
        figures=slopes.with_slopes(slopes.BytesPerToken(true, declared=true), "depth", points),
        cold=ColdStart(4_000_000, 1_000_000),
        run_id="test",
    )
    return dataclasses.replace(line, **changes)
