"""Bytes per token of a bundle: by formula, as it declares them, and as slopes of measured memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from device_bench.bundles import Bundle, job
from device_bench.devices import Transport
from device_bench.jobs import JobFailed, run_job
from device_bench.memory import slope_depths, tokens_per_page
from device_bench.result import DECLARED, MEMORY_OVER, BytesPerToken, Interval, MemoryPoint
from device_bench.schema import build
from device_bench.stats import theil_sen
from device_bench.workload import Workload
from edgeqkv.artifact import Artifact
from edgeqkv.cache import cache_spec

TOLERANCE = 0.03  # measured, declared and formula bytes per token must agree this well
LEAST_CAPACITIES = 3
UNTOLD = "the runtime does not tell where its cache is"


def formula(artifact: Artifact) -> int:
    """Bytes per token from the model alone: what the manifest's cache should be."""
    cache = artifact.cache
    layout = "auto" if cache.layout == "none" else cache.layout
    return cache_spec(artifact.model, layout=layout, dtype=cache.dtype).bytes_per_token


def contradiction(figures: BytesPerToken) -> str | None:
    """Why the three figures cannot all be true; None when those known agree within TOLERANCE."""
    known = {
        "formula": figures.formula,
        "declared by the artifact": figures.declared,
        "measured in the cache": figures.measured_cache,
    }
    pairs = [(a, b) for i, a in enumerate(known) for b in list(known)[:i]]
    for name, other in pairs:
        x, y = known[name], known[other]
        if x is not None and y is not None and abs(x - y) > TOLERANCE * max(abs(y), 1):
            return f"bytes per token: {x:.0f} {name}, {y:.0f} {other}; allowed difference 3 %"
    return None


def measure_cache(
    device: Transport,
    bundle: Bundle,
    workload: Workload,
    *,
    interpreted: bool,
    timeout_s: float | None,
) -> BytesPerToken:
    """The bytes-per-token figures of a bundle; what cannot be told is null, with the reason."""
    artifact = bundle.artifact
    known = BytesPerToken(formula(artifact))
    if artifact.cache_mode == "none":
        return dataclasses.replace(known, reason="the model keeps no cache")
    try:
        known = dataclasses.replace(known, declared=_declared(bundle, workload, timeout_s))
    except JobFailed as e:
        known = dataclasses.replace(known, reason=f"{DECLARED}{e}")
    over, contexts, reason = _slope_plan(artifact)
    reason = device.no_memory or reason
    if interpreted:
        reason = "interpreted: this process's memory says nothing about the real runtime"
    if reason is not None:
        return dataclasses.replace(known, reason=_both(known.reason, reason))
    try:
        points = _points(device, bundle, workload, over, contexts, timeout_s)
    except JobFailed as e:
        reason = _both(known.reason, f"{MEMORY_OVER}{over}: {e}")
        return dataclasses.replace(known, over=over, reason=reason)
    return with_slopes(known, over, points)


def _both(first: str | None, second: str) -> str:
    return second if first is None else f"{first}; {second}"


def with_slopes(known: BytesPerToken, over: str, points: Sequence[MemoryPoint]) -> BytesPerToken:
    """Add the two measured slopes and their intervals to ``known``."""
    tokens = [p.tokens for p in points]
    cache_bytes = [p.cache_bytes for p in points if p.cache_bytes is not None]
    told = len(cache_bytes) == len(points)
    cache = theil_sen(tokens, cache_bytes) if told else None
    process = theil_sen(tokens, [p.process_bytes for p in points])
    return dataclasses.replace(
        known,
        measured_cache=cache.value if cache else None,
        measured_process=process.value if process else None,
        ci95=Interval(cache.ci95 if cache else None, process.ci95 if process else None),
        over=over,
        reason=known.reason if told else _both(known.reason, UNTOLD),
        points=tuple(points),
    )


def _slope_plan(artifact: Artifact) -> tuple[str, Sequence[int], str | None]:
    """(over, depths or capacities, why it cannot be measured or None)."""
    over = "depth" if artifact.cache_mode == "growing" else "capacity"
    if over == "capacity":
        few = len(artifact.capacities) < LEAST_CAPACITIES
        reason = f"the bundle offers {len(artifact.capacities)} capacities, a slope needs 3"
        return over, artifact.capacities, reason if few else None
    depths = slope_depths(artifact.cache, artifact.cache.capacity)
    reason = (
        f"a context of {artifact.cache.capacity} tokens has fewer than 6 depths that fill whole "
        f"pages ({tokens_per_page(artifact.cache)} tokens each)"
    )
    return over, depths, None if depths else reason


def _points(
    device: Transport,
    bundle: Bundle,
    workload: Workload,
    over: str,
    contexts: Sequence[int],
    timeout_s: float | None,
) -> list[MemoryPoint]:
    if over == "depth":
        rows = device.run(job("depth", bundle, workload), timeout_s)
    else:
        rows = [
            row
            for capacity in contexts
            for row in device.run(
                {**job("capacity", bundle, workload), "capacity": capacity}, timeout_s
            )
        ]
    return [build(MemoryPoint, row, "point") for row in rows]


def _declared(bundle: Bundle, workload: Workload, timeout_s: float | None) -> int | None:
    """The artifact's own tensors are read on this machine, whatever device runs it."""
    found: int | None = run_job(job("declared", bundle, workload), timeout_s=timeout_s)
    return found
