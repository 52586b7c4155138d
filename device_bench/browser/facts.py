"""What the page says: about the browser when it claims the link, and about each job it ran."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from device_bench.conditions import Device
from device_bench.result import Browser, Samples
from device_bench.schema import build
from edgeqkv.errors import SpecError


@dataclasses.dataclass(frozen=True)
class Gpu:
    """name: vendor, architecture and device as far as the browser tells. software: rendered on the
    CPU, so that it shows what is computed and not how fast. fp16: it has shader-f16."""

    name: str
    software: bool
    fp16: bool


@dataclasses.dataclass(frozen=True)
class Claim:
    """The browser about itself; what it does not tell is null. no_gpu: why gpu is null."""

    user_agent: str
    cross_origin_isolated: bool
    secure_context: bool
    cpu_count: int | None
    timer_resolution_ns: int | None
    platform: str | None
    platform_version: str | None
    architecture: str | None
    model: str | None
    gpu: Gpu | None
    no_gpu: str | None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The answer to job ``id``: an error of one line, or everything else."""

    id: int
    error: str | None
    engine: str | None = None
    samples: Samples | None = None
    heap_load_bytes: int | None = None
    heap_bytes: int | None = None
    cache_binding: str | None = None


def device_of(claim: Claim, engine: str) -> Device:
    """A browser tells neither the processor nor the memory of its machine."""
    told = json.dumps(dataclasses.asdict(claim) | {"timer_resolution_ns": None}, sort_keys=True)
    return Device(
        system=claim.platform or system_of(claim.user_agent),
        release=claim.platform_version or "unknown",
        machine=claim.architecture or "unknown",
        cpu_model=None,
        cpu_count=claim.cpu_count,
        memory_bytes=None,
        kind="browser",
        emulated=engine == "webgpu" and claim.gpu is not None and claim.gpu.software,
        id=hashlib.sha256(told.encode()).hexdigest()[:8],
        model=claim.model,
        os_version=claim.platform_version,
    )


def system_of(user_agent: str) -> str:
    """Android before Linux, iPhone before Mac: both say so in their user agents."""
    known = ("Android", "iPhone", "iPad", "Windows", "Mac OS X", "CrOS", "Linux")
    return next((name for name in known if name in user_agent), "unknown")


def samples_of(claim: Claim, outcome: Outcome, engine: str) -> Samples:
    """The samples of an outcome without error, with what the browser told beside them."""
    assert outcome.samples is not None
    assert outcome.cache_binding is not None
    browser = Browser(
        user_agent=claim.user_agent,
        cross_origin_isolated=claim.cross_origin_isolated,
        timer_resolution_ns=claim.timer_resolution_ns,
        gpu=claim.gpu.name if engine == "webgpu" and claim.gpu else None,
        heap_load_bytes=outcome.heap_load_bytes,
        heap_bytes=outcome.heap_bytes,
        cache_binding=outcome.cache_binding,
    )
    return dataclasses.replace(outcome.samples, browser=browser)


def read_outcome(data: Any) -> Outcome:
    """What the page posted.

    Raises:
        SpecError: it is malformed, or says neither what it measured nor why it did not.
    """
    outcome: Outcome = build(Outcome, data, "result")
    measured = (outcome.engine, outcome.samples, outcome.cache_binding)
    if (None in measured) == (outcome.error is None):
        raise SpecError(
            "result must have either an error or an engine, samples and a cache_binding"
        )
    return outcome
