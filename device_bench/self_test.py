"""Calibration: a runtime with known figures, measured the way every other runtime is.

The fake runtime really writes a known number of bytes per token into a mapping of its own, really
touches a known workspace beside it and really takes known times. ``edgeqkv bench --self-test``
runs the ordinary sweep over it and compares.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_bench.result import BenchResult
from device_bench.stats import percentile
from edgeqkv.artifact import MANIFEST, Artifact, file_entry
from edgeqkv.cache import cache_spec
from edgeqkv.runner import check_tokens, shut
from edgeqkv.spec import ModelSpec

BACKEND = "self-test"
LOAD_NS, PREFILL_NS_PER_TOKEN, DECODE_NS = 300_000_000, 200_000, 2_000_000
WORKSPACE_BYTES_PER_TOKEN = 1024
CAPACITIES = (1024, 2048, 4096)
MODEL = ModelSpec(
    vocab_size=256,
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=512,
    max_position_embeddings=CAPACITIES[-1],
    attention_scale=0.125,
    qkv_sharing="k=v",
)


@dataclasses.dataclass(frozen=True)
class Check:
    """One figure of the self-test: what is true, what the bench reported, what may lie between."""

    figure: str
    known: int
    reported: int | None
    allowed: float
    unit: str

    @property
    def passed(self) -> bool:
        return self.reported is not None and abs(self.reported - self.known) <= self.allowed


def load(artifact: Artifact, directory: Path, *, threads: int, capacity: int) -> SelfTestRunner:
    return SelfTestRunner(artifact, capacity)


def write_bundle(
    directory: Path, cache_mode: str, *, backend: str = BACKEND, layout: str = "auto"
) -> Path:
    """A bundle for the fake runtime; ``cache_mode`` growing or static."""
    directory.mkdir(parents=True)
    (directory / "program.txt").write_text("device_bench.self_test\n")
    cache = cache_spec(MODEL, layout=layout)
    artifact = Artifact(
        backend=backend,
        entry="program.txt",
        model=MODEL,
        cache=cache,
        cache_mode=cache_mode,
        formulation="none",
        weights="fp32",
        capacities=CAPACITIES if cache_mode == "static" else CAPACITIES[-1:],
        prefill_chunk=512,
        files={"program.txt": file_entry(directory / "program.txt")},
        tools={},
        details={},
        name="self-test",
    )
    (directory / MANIFEST).write_text(json.dumps(artifact.to_dict()))
    return directory


class SelfTestRunner:
    """See ``edgeqkv.runner.Runner``. Logits are zeros; bytes and times are real."""

    engine = BACKEND
    interpreted = False
    load_ns, prefill_ns_per_token, decode_ns = LOAD_NS, PREFILL_NS_PER_TOKEN, DECODE_NS

    def __init__(self, artifact: Artifact, capacity: int) -> None:
        deadline = time.perf_counter_ns() + self.load_ns
        self.artifact, self.capacity, self.position = artifact, capacity, 0
        cache = artifact.cache
        self._maps = [_memory(cache.bytes_per_token * capacity)]
        self._maps.append(_memory(WORKSPACE_BYTES_PER_TOKEN * capacity))
        runs = cache.num_layers * cache.tensors_per_layer * cache.num_key_value_heads
        rows = np.frombuffer(self._maps[0], np.float32)
        self._rows = rows.reshape(runs, capacity, cache.head_dim)
        work = np.frombuffer(self._maps[1], np.uint8)
        self._workspace = work.reshape(capacity, WORKSPACE_BYTES_PER_TOKEN)
        if artifact.cache_mode == "static":
            self._rows[...] = 0
            self._workspace[...] = 0
        _wait_until(deadline)

    def reset(self) -> None:
        self.position = 0

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._append(ids, self.prefill_ns_per_token * ids.size)

    def decode(self, token: int) -> NDArray[np.float32]:
        return self._append(np.array([token]), self.decode_ns)

    def _append(self, ids: NDArray[np.int64], duration_ns: int) -> NDArray[np.float32]:
        deadline = time.perf_counter_ns() + duration_ns
        check_tokens(self, ids)
        new = slice(self.position, self.position + ids.size)
        self._rows[:, new] = 1
        self._workspace[new] = 1
        self.position = new.stop
        _wait_until(deadline)
        return np.zeros(self.artifact.model.vocab_size, np.float32)

    def cache_regions(self) -> list[tuple[int, int]] | None:
        return [(self._rows.ctypes.data, self._rows.nbytes)]

    def close(self) -> None:
        shut(self, "_rows", "_workspace")
        for each in self._maps:
            each.close()


def _memory(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _wait_until(deadline_ns: int) -> None:
    """Sleep most of the way, then spin: a sleep alone overshoots by 50 us, on a busy CPU by 1 ms."""
    while (left := deadline_ns - time.perf_counter_ns()) > 0:
        if left > 2_000_000:
            time.sleep((left - 1_500_000) / 1e9)


def check_results(results: Sequence[BenchResult]) -> list[Check]:
    """Every known figure beside the reported one: slopes within 1 %, times within 2 % or 50 us."""
    ok = [r for r in results if r.status == "ok"]
    checks = []
    for mode in ("growing", "static"):
        figures = [r.cache.bytes_per_token for r in ok if r.cache.mode == mode][:1]
        known = cache_spec(MODEL).bytes_per_token
        pairs: Mapping[str, tuple[int, Callable[[Any], float | None]]] = {
            "cache": (known, lambda b: b.measured_cache),
            "process": (known + WORKSPACE_BYTES_PER_TOKEN, lambda b: b.measured_process),
        }
        for name, (true, read) in pairs.items():
            reported = read(figures[0]) if figures else None
            checks.append(
                Check(f"{name} slope, {mode}", true, _whole(reported), 0.01 * true, "B/token")
            )
    timed = [(r.workload, r.samples) for r in ok if r.samples is not None]
    loads = [s.load_ns for _, s in timed]
    firsts = [(w.n_prompt, rep[0]) for w, s in timed if w.n_prompt for rep in s.repetitions]
    gaps = [
        b - a
        for w, s in timed
        if w.n_gen
        for rep in s.repetitions
        for a, b in itertools.pairwise(rep)
    ]
    prompt = firsts[0][0] if firsts else 0
    times: list[tuple[str, int, Sequence[float]]] = [
        ("load", LOAD_NS, loads),
        (f"TTFT of {prompt} tokens", PREFILL_NS_PER_TOKEN * prompt, [t for _, t in firsts]),
        ("TPOT", DECODE_NS, gaps),
    ]
    for figure, true_ns, values in times:
        found = percentile(values, 50)
        allowed = max(0.02 * true_ns, 50_000)
        checks.append(Check(figure, true_ns, _whole(found), allowed, "ns"))
    return checks


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
