"""The parent's side of a sweep: plan, run each configuration in fresh processes, assemble lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from device_bench.conditions import Bandwidth, Conditions, Device
from device_bench.devices import Transport
from device_bench.jobs import JobFailed, run_job
from device_bench.memory import slope_depths, tokens_per_page
from device_bench.result import (
    SCHEMA_VERSION,
    ArtifactInfo,
    BenchResult,
    BytesPerToken,
    CacheFacts,
    Interval,
    Memory,
    MemoryPoint,
    ModelFacts,
    Samples,
)
from device_bench.schema import build
from device_bench.stability import ATTEMPTS, NO_LIMITS, Limits
from device_bench.stats import theil_sen
from device_bench.workload import Workload
from edgeqkv.artifact import MANIFEST, Artifact, file_entry, read_artifact
from edgeqkv.cache import cache_spec

TOLERANCE = 0.03  # measured, declared and formula bytes per token must agree this well
LEAST_CAPACITIES = 3


@dataclasses.dataclass(frozen=True)
class Bundle:
    path: Path
    artifact: Artifact
    sha256: str


def open_bundle(path: Path) -> Bundle:
    """Read and hash a bundle once for the whole sweep; raises BundleError."""
    return Bundle(path, read_artifact(path), file_entry(path / MANIFEST).sha256)


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
        known = dataclasses.replace(known, reason=f"declared: {e}")
    over, contexts, reason = _slope_plan(artifact)
    reason = device.no_memory or reason
    if interpreted:
        reason = "interpreted: this process's memory says nothing about the real runtime"
    if reason is not None:
        return dataclasses.replace(known, reason=reason)
    try:
        points = _points(device, bundle, workload, over, contexts, timeout_s)
    except JobFailed as e:
        return dataclasses.replace(known, over=over, reason=f"memory over {over}: {e}")
    return with_slopes(known, over, points)


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
        reason=known.reason if told else "the runtime does not tell where its cache is",
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
        rows = device.run(_job("depth", bundle, workload), timeout_s)
    else:
        rows = [
            row
            for capacity in contexts
            for row in device.run(
                {**_job("capacity", bundle, workload), "capacity": capacity}, timeout_s
            )
        ]
    return [build(MemoryPoint, row, "point") for row in rows]


def _declared(bundle: Bundle, workload: Workload, timeout_s: float | None) -> int | None:
    """The artifact's own tensors are read on this machine, whatever device runs it."""
    found: int | None = run_job(_job("declared", bundle, workload), timeout_s=timeout_s)
    return found


def _job(name: str, bundle: Bundle, workload: Workload) -> dict[str, Any]:
    """A job as ``device_bench.worker`` reads it."""
    path = str(bundle.path.resolve())
    return {"pass": name, "bundle": path, "workload": dataclasses.asdict(workload)}


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
        found = device.run(_job("memory", bundle, workload), timeout_s)
    except JobFailed as e:
        return state, dataclasses.replace(outcome, reason=f"memory pass: {e}")
    usage = None if found is None else build(Memory, found, "memory")
    return state, dataclasses.replace(outcome, memory=usage)


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
        timed = device.run(_job("time", bundle, workload), timeout_s)
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


def step_weight_bytes(artifact: Artifact) -> int:
    """Bytes of weights that one decode step reads at least, as the bundle's recipe stores them.

    Every matrix that is multiplied and every vector; of the two tables that a token is looked up in
    one row each, which rounds to nothing, unless the output layer is tied to the first.
    """
    spec, recipe = artifact.model, artifact.quantisation.recipe
    looked_up = ["wpe"] if spec.tie_word_embeddings else ["wpe", "wte"]
    shapes = spec.parameter_shapes()
    tables = [recipe.rule_for(t).nbytes(shapes[f"{t}.weight"]) for t in looked_up]
    return recipe.weight_bytes(spec) - sum(tables)


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
    untimed = {r.artifact.sha256 for r in here if r.artifact.interpreted}
    for index, workload in plan:
        bundle = bundles[index]
        if (configuration := (bundle.sha256, *workload.sizes, *where)) in done:
            continue
        if workload.process and bundle.sha256 in untimed:
            continue  # an interpreter's time says nothing, however often it is taken
        done.add(configuration)
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
        if outcome.interpreted:
            untimed.add(bundle.sha256)
        figures = caches.get(bundle.sha256) or BytesPerToken(
            formula(bundle.artifact), reason="not asked for, or the bundle never ran"
        )
        finished(
            assemble(
                bundle,
                workload,
                outcome,
                machine=machine,
                state=dataclasses.replace(state, read_bandwidth=bandwidth),
                figures=figures,
                run_id=run_id,
            )
        )


def _known_caches(results: Sequence[BenchResult]) -> dict[str, BytesPerToken]:
    cached = ((r.artifact.sha256, r.cache.bytes_per_token) for r in results)
    return {sha: b for sha, b in cached if b.points or b.declared is not None}
