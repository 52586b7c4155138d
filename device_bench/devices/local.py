"""This machine: a fresh process per job, of Python or of the native runner."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from device_bench import cold, conditions
from device_bench.devices import Transport
from device_bench.jobs import run_job
from device_bench.memory import WORKER_ENV, supported
from edgeqkv.errors import UsageError

_NO_PROC = "resident memory is read from /proc, which this system lacks"


def open_devices(argument: str | None, engine: str | None) -> Sequence[Transport]:
    if argument is not None:
        raise UsageError(f"--device is local:{argument}; local takes nothing after a colon")
    name = engine or "python"
    if name not in _ENGINES:
        allowed = ", ".join(_ENGINES)
        raise UsageError(f"--engine is {engine!r}; allowed with --device local: {allowed}")
    return [Here(name)]


class Here:
    """This machine, by one of _ENGINES. See ``device_bench.devices.Transport``."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.no_memory = None if supported() else _NO_PROC
        self.cold = engine == "python" and cold.supported

    def pin(self, cores: tuple[int, ...]) -> None:
        pin_here(cores)

    def describe(self) -> conditions.Device:
        return conditions.device()

    def conditions(self, threads: int) -> conditions.Conditions:
        now = conditions.conditions(threads)
        if self.engine == "python":
            return now
        return dataclasses.replace(now, python=None, engine=self.engine)

    def run(self, job: Mapping[str, Any], timeout_s: float | None) -> Any:
        return _ENGINES[self.engine](job, timeout_s)

    def close(self) -> None:
        pass


def run_python(job: Mapping[str, Any], timeout_s: float | None) -> Any:
    env = {} if job["pass"] in ("time", "cold") else WORKER_ENV
    return run_job(job, timeout_s=timeout_s, env=env)


def run_native(job: Mapping[str, Any], timeout_s: float | None) -> Any:
    """By the C runner with the installed runtime's library: its memory is the runtime's alone."""
    from device_bench.native.run import run_here

    return run_here(job, timeout_s, _command)


def _command(backend: str) -> tuple[list[str], str]:
    from device_bench.native.build import build_here

    runner = build_here(backend)
    return [str(runner.program)], runner.library


# What --engine may name here -> what runs a job.
_ENGINES: dict[str, Callable[[Mapping[str, Any], float | None], Any]] = {
    "python": run_python,
    "native": run_native,
}


def pin_here(cores: tuple[int, ...]) -> None:
    """Restrict this process, and so every job that it starts; raises UsageError."""
    try:
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError, ValueError):
        allowed = (
            f"0 to {(os.cpu_count() or 1) - 1}" if hasattr(os, "sched_setaffinity") else "none"
        )
        raise UsageError(f"--cores {','.join(map(str, cores))}: allowed here: {allowed}") from None
