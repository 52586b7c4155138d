"""BenchResult: one line of results.jsonl. Raw samples are kept; statistics are computed on read.

Anything that was not measured is null, never 0. ``result.schema.json`` beside this file is the
same definition as a JSON Schema.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from device_bench.conditions import Conditions, Device
from device_bench.schema import build, json_schema
from device_bench.workload import Workload
from edgeqkv.errors import SpecError
from edgeqkv.spec import ModelSpec

SCHEMA_VERSION = 2
READS = (1, 2)  # 2 only adds fields, each with a default
STATUSES = ("ok", "invalid", "failed")
# How the reason of BytesPerToken begins where a process failed that should have told.
DECLARED, MEMORY_OVER = "declared: ", "memory over "


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """label: the papers' name of the variant. spec: ModelSpec in Hugging Face's field names."""

    label: str
    num_parameters: int
    spec: ModelSpec


@dataclasses.dataclass(frozen=True)
class ArtifactInfo:
    """The bundle that ran. nbytes: the model's own files. sha256: of its manifest.json, which
    holds the sha256 of every other file. engine and interpreted are null when it never loaded;
    interpreted true means that its timings say nothing about the real runtime. step_weight_bytes:
    what one decode step reads of the weights at least."""

    name: str
    backend: str
    formulation: str
    weights: str
    nbytes: int
    sha256: str
    tools: Mapping[str, str]
    details: Mapping[str, Any]
    engine: str | None
    interpreted: bool | None
    step_weight_bytes: int | None = None

    @property
    def stored_weights(self) -> str:
        """What the file holds, where that is not what was asked for: Core ML's fp32 is fp16."""
        return str(self.details.get("stored_weights", self.weights))


@dataclasses.dataclass(frozen=True)
class MemoryPoint:
    """One point of a slope: resident bytes while `tokens` of context (or of capacity) are held.

    cache_bytes: of the cache's own memory. process_bytes: private dirty + swap of the process."""

    tokens: int
    cache_bytes: int | None
    process_bytes: int


@dataclasses.dataclass(frozen=True)
class Interval:
    """95 % intervals of the two measured slopes, bytes per token."""

    measured_cache: tuple[float, float] | None = None
    measured_process: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class BytesPerToken:
    """formula: from the model. declared: by the artifact's own tensors. measured_cache: slope of
    the cache's own resident memory; measured_process: of the whole process, whose surplus is
    workspace. over: depth (a growing cache) or capacity (a static one). reason: why a figure is
    null."""

    formula: int
    declared: int | None = None
    measured_cache: float | None = None
    measured_process: float | None = None
    ci95: Interval = Interval()
    over: str | None = None
    reason: str | None = None
    points: tuple[MemoryPoint, ...] = ()


@dataclasses.dataclass(frozen=True)
class CacheFacts:
    """layout shared: one tensor per layer serves as key and value; separate: two. mode growing:
    memory follows the context; static: paid for `capacity` tokens; none: no cache."""

    layout: str
    dtype: str
    tensors_per_layer: int
    mode: str
    capacity: int
    bytes_per_token: BytesPerToken


@dataclasses.dataclass(frozen=True)
class Browser:
    """What only a page can tell. timer_resolution_ns: the smallest step of its clock; null where
    none was seen. gpu: the adapter that ran it, null on the CPU. heap_load_bytes, heap_bytes: of the
    runtime's WebAssembly memory after load and at the end; it never shrinks. cache_binding: how the
    cache was given to the runtime, and what of it was copied for each token."""

    user_agent: str
    cross_origin_isolated: bool
    timer_resolution_ns: int | None
    gpu: str | None
    heap_load_bytes: int | None
    heap_bytes: int | None
    cache_binding: str


@dataclasses.dataclass(frozen=True)
class Samples:
    """Nanoseconds of a monotonic clock. first_call: one token through the program right after
    load. warmup and repetitions: time since the start of the timed region at which each token's
    logits were there; prefill gives one (the first token's), each decode step one more. browser: of
    a page only. golden_max_abs: the largest difference of a logit from the golden vectors', where
    they were computed before the clock started (the native runner); null elsewhere."""

    import_ns: int | None
    load_ns: int
    first_call_ns: int
    warmup: tuple[int, ...]
    repetitions: tuple[tuple[int, ...], ...]
    browser: Browser | None = None
    golden_max_abs: float | None = None


@dataclasses.dataclass(frozen=True)
class ColdStart:
    """One start with the bundle's files dropped from the page cache and the SDK imported, ns.
    first_call: one token right after, which reads what load only mapped."""

    load_ns: int
    first_call_ns: int


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Memory of the process from smaps_rollup, bytes. RSS >= PSS >= USS. uss: private clean +
    dirty. file_clean: clean pages, which the system may drop and read again."""

    rss: int
    pss: int
    uss: int
    anonymous: int
    swap: int
    file_clean: int
    private_dirty: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """One pass of the workload in a process of its own. baseline: before the runtime is imported.
    after_prefill: the context of the workload is held. peak_rss: VmHWM."""

    method: str
    baseline: Snapshot
    after_import: Snapshot | None
    after_load: Snapshot
    after_prefill: Snapshot | None
    after_decode: Snapshot | None
    peak_rss: int


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """One process of one configuration of one bundle: what ran, where, and everything measured.
    run_id names the sweep. status invalid: a measurement contradicts formula or declaration;
    failed: the configuration did not run to its end; reason says why. memory: of the first process
    only. cold: of the bundle, taken once a sweep. quality: from an evaluation, else null. unstable:
    which limit of the conditions was still broken after the last attempt; discarded: the samples of
    the attempts before it."""

    schema_version: int
    run_id: str
    status: str
    reason: str | None
    model: ModelFacts
    artifact: ArtifactInfo
    cache: CacheFacts
    device: Device
    conditions: Conditions
    workload: Workload
    samples: Samples | None
    memory: Memory | None
    quality: Mapping[str, Any] | None = None
    unstable: str | None = None
    discarded: tuple[Samples, ...] = ()
    cold: ColdStart | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Any) -> BenchResult:
        """The inverse of :meth:`to_dict` after a trip through JSON; SpecError names what is wrong."""
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version not in READS:
            raise SpecError(
                f"not a bench result: schema_version is {version!r}, this edgeqkv reads "
                f"{' and '.join(map(str, READS))}"
            )
        result: BenchResult = build(BenchResult, data, "result")
        if result.status not in STATUSES:
            raise SpecError(f"status is {result.status!r}; allowed: {', '.join(STATUSES)}")
        return result

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What makes two lines the same measurement, which --resume skips."""
        where = (self.device.kind, self.device.id, self.conditions.engine)
        return (self.artifact.sha256, *self.workload.sizes, *where)

    @property
    def incomplete(self) -> bool:
        """A process failed that may do better next time: --resume runs it again."""
        if self.status == "failed":
            return self.workload.misfit(self.cache.capacity) is None
        reason = self.cache.bytes_per_token.reason or ""
        return self.status == "ok" and reason.startswith((DECLARED, MEMORY_OVER))


def schema() -> dict[str, Any]:
    """The JSON Schema of one line; ``python -m device_bench.result`` writes it to the package."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "edgeqkv bench"}
    found = json_schema(BenchResult)
    found["properties"]["schema_version"] = {"enum": list(READS)}
    found["properties"]["status"] = {"enum": list(STATUSES)}
    return {**about, **found}


_GIVE = "give the RESULTS.jsonl that `edgeqkv bench -o` wrote"


def read_results(path: Path) -> tuple[list[BenchResult], str | None]:
    """(results, warning). A last line cut short by a kill is left out, and the warning says so; so is
    an incomplete one, without a word, that --resume ran again: a later line says what became of it.

    Raises:
        SpecError: the file holds anything else than results.
    """
    results: list[BenchResult] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            if results and number == len(lines):
                warning = f"{path}: line {number} was cut short (a killed run?); skipped"
                return _newest(results), warning
            raise SpecError(f"{path}: line {number} is not JSON; {_GIVE}") from None
        try:
            results.append(BenchResult.from_dict(data))
        except SpecError as e:
            raise SpecError(f"{path}: line {number}: {e}; {_GIVE}") from None
    if not results:
        raise SpecError(f"{path} holds no results; {_GIVE}")
    return _newest(results), None


def _newest(results: list[BenchResult]) -> list[BenchResult]:
    last = {r.configuration: i for i, r in enumerate(results)}
    return [r for i, r in enumerate(results) if i == last[r.configuration] or not r.incomplete]


def cut_partial_line(path: Path) -> None:
    """Remove what a killed run left after the last newline, so that appending starts a line."""
    with path.open("r+b") as f:
        f.truncate(f.read().rfind(b"\n") + 1)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """The error of a write, to a full disk say, names no file; here it names ``path``."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


def append_result(path: Path, result: BenchResult) -> None:
    """Add one line and wait until the disk has it."""
    line = json.dumps(result.to_dict(), allow_nan=False, separators=(",", ":"))
    with naming(path), path.open("ab") as f:
        f.write(line.encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())


def main() -> None:
    target = Path(__file__).with_name("result.schema.json")
    target.write_text(json.dumps(schema(), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
