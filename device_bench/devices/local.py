"""This machine: a fresh Python process per job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from device_bench import conditions
from device_bench.devices import Transport
from device_bench.jobs import run_job
from device_bench.memory import WORKER_ENV, supported
from edgeqkv.errors import UsageError


def open_devices(argument: str | None, engine: str | None) -> Sequence[Transport]:
    if argument is not None:
        raise UsageError(f"--device is local:{argument}; local takes nothing after a colon")
    if engine not in (None, "python"):
        raise UsageError(f"--engine is {engine!r}; allowed with --device local: python")
    return [PythonHere()]


class PythonHere:
    """See ``device_bench.devices.Transport``."""

    engine = "python"

    def __init__(self) -> None:
        lacking = "resident memory is read from /proc, which this system lacks"
        self.no_memory = None if supported() else lacking

    def describe(self) -> conditions.Device:
        return conditions.device()

    def conditions(self, threads: int) -> conditions.Conditions:
        return conditions.conditions(threads)

    def run(self, job: Mapping[str, Any], timeout_s: float | None) -> Any:
        env = {} if job["pass"] == "time" else WORKER_ENV
        return run_job(job, timeout_s=timeout_s, env=env)

    def close(self) -> None:
        pass
