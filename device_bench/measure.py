"""The only timing loop, and the passes that read memory. All of it runs in a worker process.

Tokenisation and sampling are outside: token ids are drawn before the clock starts, and a token's
time is the moment its logits are in the caller's hands.
"""

from __future__ import annotations

import gc
import importlib
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from device_bench import memory
from device_bench.cold import evict
from device_bench.result import ColdStart, Memory, MemoryPoint, Samples, Snapshot
from device_bench.workload import Workload
from edgeqkv.artifact import Artifact, file_entry, inside
from edgeqkv.errors import RunError
from edgeqkv.quiet import quiet
from edgeqkv.runner import Runner, load_runner, runner_entry

_clock = time.perf_counter_ns


def import_runtime(artifact: Artifact, bundle: Path) -> int | None:
    """Import the modules that the runner's module names in RUNTIME; their time in ns, None if unnamed.

    A missing SDK is left to ``load_runner``, which says how to install it.
    """
    module = importlib.import_module(runner_entry(artifact, bundle).module)
    names = getattr(module, "RUNTIME", "").split()
    start = _clock()
    try:
        with quiet():
            for name in names:
                importlib.import_module(name)
    except ImportError:
        return None
    return _clock() - start if names else None


def run_once(runner: Runner, workload: Workload, ids: NDArray[np.int64]) -> tuple[int, ...]:
    """One repetition: fill the context, then time prefill and every decode step.

    Returns ns since the start of the timed region at which each token's logits were there: one
    for the prompt's last token when there is a prompt, one for each of n_gen tokens.
    """
    depth, end = workload.n_depth, workload.n_depth + workload.n_prompt
    prompt, tokens = ids[depth:end], ids[end:].tolist()
    runner.reset()
    if depth:
        runner.prefill(ids[:depth])
    stamps = []
    gc.collect()
    gc.disable()
    try:
        start = _clock()
        if prompt.size:
            runner.prefill(prompt)
            stamps.append(_clock() - start)
        for token in tokens:
            runner.decode(token)
            stamps.append(_clock() - start)
    finally:
        gc.enable()
    return tuple(stamps)


def time_pass(artifact: Artifact, bundle: Path, workload: Workload) -> tuple[Samples, str, bool]:
    """(samples, engine, interpreted) of one configuration, in a process that did nothing else."""
    import_ns = import_runtime(artifact, bundle)
    start = _clock()
    runner = load_runner(artifact, bundle, threads=workload.n_threads)
    load_ns = _clock() - start
    try:
        check_fits(runner, workload)
        ids = workload.ids(artifact.model.used_tokens)
        start = _clock()
        runner.prefill(ids[:1])
        first_call_ns = _clock() - start
        # An interpreter's time says nothing: one run shows that the workload runs at all.
        warmup = () if runner.interpreted else run_once(runner, workload, ids)
        count = 1 if runner.interpreted else workload.repetitions
        repetitions = tuple(run_once(runner, workload, ids) for _ in range(count))
        samples = Samples(import_ns, load_ns, first_call_ns, warmup, repetitions)
        return samples, runner.engine, runner.interpreted
    finally:
        runner.close()


def cold_pass(artifact: Artifact, bundle: Path, workload: Workload) -> ColdStart | None:
    """A start from the disk; None where the page cache keeps the bundle's files."""
    import_runtime(artifact, bundle)
    files = [inside(bundle, name) for name in artifact.files]
    if not evict(files):
        return None
    start = _clock()
    runner = load_runner(artifact, bundle, threads=workload.n_threads)
    loaded = _clock()
    runner.prefill(workload.ids(artifact.model.used_tokens)[:1])
    found = ColdStart(loaded - start, _clock() - loaded)
    runner.close()
    for path in files:
        file_entry(path)  # reads all of it: the next process is to find the page cache as it was
    return found


def check_fits(runner: Runner, workload: Workload) -> None:
    if (reason := workload.misfit(runner.capacity)) is not None:
        raise RunError(reason)


def memory_pass(artifact: Artifact, bundle: Path, workload: Workload) -> Memory | None:
    """What the process holds after each stage of one untimed run; None off Linux."""
    baseline = memory.snapshot()
    if baseline is None:
        return None
    imported = import_runtime(artifact, bundle) is not None
    after_import = memory.snapshot() if imported else None
    runner = load_runner(artifact, bundle, threads=workload.n_threads)
    try:
        check_fits(runner, workload)
        after_load = _now()
        ids = workload.ids(artifact.model.used_tokens)
        filled = workload.n_depth + workload.n_prompt
        if filled:
            runner.prefill(ids[:filled])
        after_prefill = _now() if filled else None
        for token in ids[filled:].tolist():
            runner.decode(token)
        after_decode = _now() if workload.n_gen else None
        stages = (baseline, after_import, after_load, after_prefill, after_decode)
        return Memory(memory.METHOD, *stages, memory.peak_rss())
    finally:
        runner.close()


def _now() -> Snapshot:
    found = memory.snapshot()
    assert found is not None
    return found


def depth_pass(artifact: Artifact, bundle: Path, workload: Workload) -> list[MemoryPoint]:
    """Resident bytes of a growing cache at several depths, reached one decode step at a time.

    Steps, not chunks: the process then holds the workspace of decoding, not of a prefill.
    """
    runner = load_runner(artifact, bundle, threads=workload.n_threads)
    try:
        depths = memory.slope_depths(artifact.cache, runner.capacity)
        used = artifact.model.used_tokens
        tokens = np.random.default_rng(workload.seed).integers(0, used, depths[-1]).tolist()
        points = []
        runner.decode(tokens[0])  # depth 0 too is read with the workspace that a step leaves
        runner.reset()
        for depth in depths:
            for token in tokens[runner.position : depth]:
                runner.decode(token)
            points.append(_point(runner, depth))
        return points
    finally:
        runner.close()


def capacity_point(
    artifact: Artifact, bundle: Path, workload: Workload, capacity: int
) -> list[MemoryPoint]:
    """Resident bytes of a static cache loaded for ``capacity`` tokens, once all are written."""
    runner = load_runner(artifact, bundle, threads=workload.n_threads, capacity=capacity)
    try:
        used = artifact.model.used_tokens
        rng = np.random.default_rng(workload.seed)
        runner.prefill(rng.integers(0, used, runner.capacity, dtype=np.int64))
        return [_point(runner, runner.capacity)]
    finally:
        runner.close()


def _point(runner: Runner, tokens: int) -> MemoryPoint:
    regions = runner.cache_regions()
    held = None if regions is None else memory.resident_bytes(regions)
    gc.collect()
    return MemoryPoint(tokens, held, memory.process_bytes(_now()))
