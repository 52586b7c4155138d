"""The parent's side of a sweep: run each configuration in fresh processes, assemble lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

from device_bench.bundles import Bundle, job, step_weight_bytes
from device_bench.conditions import Bandwidth, Conditions, Device
from device_bench.devices import Transport
from device_bench.jobs import JobFailed
from device_bench.result import (
    SCHEMA_VERSION,
    ArtifactInfo,
    BenchResult,
    BytesPerToken,
    CacheFacts,
    ColdStart,
    Memory,
    ModelFacts,
    Samples,
)
from device_bench.schema import build
from device_bench.slopes import contradiction, formula, measure_cache
from device_bench.stability import ATTEMPTS, NO_LIMITS, Limits
from device_bench.workload import Workload


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the processes of one configuration brought back. reason: why they did not finish.
    unstable, discarded: as in BenchResult."""

    samples: Samples | None = None
    engine: str | None = None
    interpreted: bool | None = None
    memory: Memory | None = None
    reason: str | None = None
    unstable: str | None = None
    discarded: tuple[Samples, ...] = ()


def run_configuration(
    device: Transport,
    bundle: Bundle,
    workload: Workload,
    limits: Limits,
    *,
    with_memory: bool,
    timeout_s: float | None,
) -> tuple[Conditions, Outcome]:
    """Time in one process, again while it breaks a limit, and memory in another; a failure is an
    outcome."""
    discarded: list[Samples] = []
    while True:
        limits.wait(lambda: device.conditions(workload.n_threads).temperature_c)
        state, outcome = _timed(device, bundle, workload, limits, timeout_s)
        if not outcome.unstable or outcome.samples is None or len(discarded) + 1 == ATTEMPTS:
            break
        discarded.append(outcome.samples)
    state = dataclasses.replace(state, attempts=len(discarded) + 1)
    outcome = dataclasses.replace(outcome, discarded=tuple(discarded))
    skipped = not with_memory or outcome.interpreted or device.no_memory
    if skipped or outcome.samples is None:
        return state, outcome
    try:
        found = device.run(job("memory", bundle, workload), timeout_s)
    except JobFailed as e:
        return state, dataclasses.replace(outcome, reason=f"memory pass: {e}")
    usage = None if found is None else build(Memory, found, "memory")
    return state, dataclasses.replace(outcome, memory=usage)


def cold_start(
    device: Transport, bundle: Bundle, workload: Workload, timeout_s: float | None
) -> ColdStart | None:
    """None on a transport without a true attribute ``cold``: it cannot drop pages from its memory."""
    if not getattr(device, "cold", False):
        return None
    try:
        found = device.run(job("cold", bundle, workload), timeout_s)
    except JobFailed:
        return None  # the timed process ran, and says what there is to say
    return None if found is None else build(ColdStart, found, "cold")


def _timed(
    device: Transport,
    bundle: Bundle,
    workload: Workload,
    limits: Limits,
    timeout_s: float | None,
) -> tuple[Conditions, Outcome]:
    """One process on the clock, and the state of the device around it."""
    state = device.conditions(workload.n_threads)
    state = dataclasses.replace(state, max_cv=limits.max_cv, max_temp_c=limits.max_temp_c)
    try:
        timed = device.run(job("time", bundle, workload), timeout_s)
    except JobFailed as e:
        return state, Outcome(reason=str(e))
    samples = build(Samples, timed["samples"], "samples")
    after = device.conditions(workload.n_threads).temperature_c
    state = dataclasses.replace(state, temperature_after_c=after)
    hottest = max((t for t in (state.temperature_c, after) if t is not None), default=None)
    unstable = None if timed["interpreted"] else limits.broken(samples, hottest)
    return state, Outcome(samples, timed["engine"], timed["interpreted"], unstable=unstable)


def assemble(
    bundle: Bundle,
    workload: Workload,
    outcome: Outcome,
    *,
    machine: Device,
    state: Conditions,
    figures: BytesPerToken,
    cold: ColdStart | None = None,
    run_id: str,
) -> BenchResult:
    """The line of one configuration, judged: failed, invalid or ok."""
    artifact, cache = bundle.artifact, bundle.artifact.cache
    status, reason = "ok", contradiction(figures)
    if reason is not None:
        status = "invalid"
    if outcome.reason is not None:
        status, reason = "failed", outcome.reason
    return BenchResult(
        schema_version=SCHEMA_VERSION,
        run_id=run_id,
        status=status,
        reason=reason,
        model=ModelFacts(artifact.model.label, artifact.model.num_parameters(), artifact.model),
        artifact=_artifact_info(bundle, outcome.engine, outcome.interpreted),
        cache=CacheFacts(
            layout=cache.layout,
            dtype=cache.dtype,
            tensors_per_layer=cache.tensors_per_layer,
            mode=artifact.cache_mode,
            capacity=cache.capacity,
            bytes_per_token=figures,
        ),
        device=machine,
        conditions=state,
        workload=workload,
        samples=outcome.samples,
        memory=outcome.memory,
        unstable=outcome.unstable,
        discarded=outcome.discarded,
        cold=cold,
    )


def _artifact_info(bundle: Bundle, engine: str | None, interpreted: bool | None) -> ArtifactInfo:
    artifact = bundle.artifact
    return ArtifactInfo(
        name=artifact.name or bundle.path.resolve().name,
        backend=artifact.backend,
        formulation=artifact.formulation,
        weights=artifact.weights,
        nbytes=artifact.nbytes,
        sha256=bundle.sha256,
        tools=artifact.tools,
        details=artifact.details,
        engine=engine,
        interpreted=interpreted,
        step_weight_bytes=step_weight_bytes(artifact),
    )


def without_repeats(
    bundles: Sequence[Bundle], plan: Sequence[tuple[int, Workload]]
) -> list[tuple[int, Workload]]:
    """Of a workload that its bundle's context cannot hold only the first process, which says so."""
    capacities = [b.artifact.cache.capacity for b in bundles]
    return [(i, w) for i, w in plan if not (w.process and w.misfit(capacities[i]))]


def by_completeness(
    earlier: Sequence[BenchResult], planned: Container[tuple[Any, ...]], with_memory: bool
) -> tuple[list[BenchResult], str | None]:
    """(what counts of earlier lines, what of ``planned`` is run again in words)."""
    again = [r.incomplete and (with_memory or r.status == "failed") for r in earlier]
    asked = [
        r.status for r, a in zip(earlier, again, strict=True) if a and r.configuration in planned
    ]
    counts = {"failed": asked.count("failed"), "half measured": asked.count("ok")}
    words = " and ".join(f"{n} {what}" for what, n in counts.items() if n)
    kept = [r for r, a in zip(earlier, again, strict=True) if not a]
    return kept, f"{words} earlier, run again" if words else None


def run_sweep(
    device: Transport,
    bundles: Sequence[Bundle],
    plan: Sequence[tuple[int, Workload]],
    *,
    run_id: str,
    with_memory: bool,
    timeout_s: float | None,
    limits: Limits = NO_LIMITS,
    bandwidth: tuple[Bandwidth, ...] | None = None,
    earlier: Sequence[BenchResult] = (),
    finished: Callable[[BenchResult], None],
) -> None:
    """Run on ``device`` what of ``plan`` ``earlier`` does not hold; hand out each line."""
    machine = device.describe()
    where = (machine.kind, machine.id, device.engine)
    done = {r.configuration for r in earlier}
    here = [r for r in earlier if r.configuration[-3:] == where]
    caches = _known_caches(here)
    colds: dict[str, ColdStart | None] = {r.artifact.sha256: r.cold for r in here if r.cold}
    untimed = {r.artifact.sha256 for r in here if r.artifact.interpreted}
    for index, workload in plan:
        bundle = bundles[index]
        if (configuration := (bundle.sha256, *workload.sizes, *where)) in done:
            continue
        if workload.process and bundle.sha256 in untimed:
            continue  # an interpreter's time says nothing, however often it is taken
        done.add(configuration)
        if misfit := workload.misfit(bundle.artifact.cache.capacity):
            state, outcome = device.conditions(workload.n_threads), Outcome(reason=misfit)
        else:
            state, outcome = run_configuration(
                device,
                bundle,
                workload,
                limits,
                with_memory=with_memory and workload.process == 0,
                timeout_s=timeout_s,
            )
        if with_memory and bundle.sha256 not in caches and outcome.interpreted is not None:
            one = dataclasses.replace(workload, n_threads=1)  # a thread pool's stacks are no cache
            caches[bundle.sha256] = measure_cache(
                device, bundle, one, interpreted=outcome.interpreted, timeout_s=timeout_s
            )
        if bundle.sha256 not in colds and outcome.interpreted is False:
            colds[bundle.sha256] = cold_start(device, bundle, workload, timeout_s)
        if outcome.interpreted:
            untimed.add(bundle.sha256)
        figures = caches.get(bundle.sha256) or BytesPerToken(
            formula(bundle.artifact),
            reason="the bundle never ran" if with_memory else "not asked for (--no-memory)",
        )
        finished(
            assemble(
                bundle,
                workload,
                outcome,
                machine=machine,
                state=dataclasses.replace(state, read_bandwidth=bandwidth),
                figures=figures,
                cold=colds.get(bundle.sha256),
                run_id=run_id,
            )
        )


def _known_caches(results: Sequence[BenchResult]) -> dict[str, BytesPerToken]:
    cached = ((r.artifact.sha256, r.cache.bytes_per_token) for r in results)
    return {sha: b for sha, b in cached if b.points or b.declared is not None}
