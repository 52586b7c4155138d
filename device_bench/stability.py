"""When a figure may be believed: limits to run again for, and what to warn of, as pyperf does."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

from device_bench.figures import Row, unusual
from device_bench.result import BenchResult, Samples
from device_bench.stats import variation
from edgeqkv.errors import UsageError

ATTEMPTS = 3  # runs of one process before it is marked unstable
LONGEST_WAIT_S = 600.0  # for a device to cool down, before it is used hot
_WAIT_STEP_S = 5.0
# What is worth a warning where no limit was given: pyperf's 10 %, halved, for it is the mean of a
# configuration that one wants and not of a process.
HIGH_CV = 0.05
FEW_PROCESSES, FEW_REPETITIONS = 3, 3


@dataclasses.dataclass(frozen=True)
class Limits:
    """max_cv: standard deviation over mean of the repetitions' durations in a process, a share.
    max_temp_c: before and after a process. cooldown_s: slept before each process."""

    max_cv: float | None = None
    max_temp_c: float | None = None
    cooldown_s: float = 0.0

    def broken(self, samples: Samples | None, temperature_c: float | None) -> str | None:
        """Which limit a process broke; None where it broke none or cannot be judged."""
        cv = None if samples is None else variation([rep[-1] for rep in samples.repetitions if rep])
        if self.max_cv is not None and cv is not None and cv > self.max_cv:
            return f"repetitions vary by {cv:.1%}, --max-cv is {self.max_cv:.1%}"
        if self.max_temp_c is not None and (temperature_c or 0) > self.max_temp_c:
            return f"{temperature_c:.0f} C, --max-temp-c is {self.max_temp_c:.0f}"
        return None

    def wait(self, temperature_c: Callable[[], float | None]) -> None:
        """Sleep the cooldown, and on until the device is cool enough or LONGEST_WAIT_S is over."""
        time.sleep(self.cooldown_s)
        end = time.monotonic() + LONGEST_WAIT_S
        while self.broken(None, temperature_c()) and time.monotonic() < end:
            time.sleep(max(self.cooldown_s, _WAIT_STEP_S))


NO_LIMITS = Limits()


def parse_share(text: str, flag: str) -> float:
    """``5%`` or ``5`` -> 0.05; raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%?\s*", text)
    if match is None:
        raise UsageError(f"{flag} is {text!r}; it must be a percentage such as 5%")
    return float(match[1]) / 100


def warnings(results: Sequence[BenchResult], rows: Sequence[Row]) -> list[str]:
    """What makes the timings of these results hard to repeat, a line each; empty is good."""
    timed = [r for r in results if r.samples is not None and not r.artifact.interpreted]
    if not timed:
        return []
    checks: dict[str, Callable[[BenchResult], bool]] = {
        "more runnable processes than CPUs": _overloaded,
        "more threads than CPUs": lambda r: (
            (r.device.cpu_count or r.workload.n_threads) < r.workload.n_threads
        ),
        "on battery": lambda r: r.conditions.power == "battery",
        "a CPU governor other than performance": lambda r: (
            r.conditions.governor not in (None, "performance")
        ),
    }
    lines = []
    for what, holds in checks.items():
        if count := sum(map(holds, timed)):
            share = f"{count} of {len(timed)} processes"
            lines.append(f"{what} during {share}; their timings will not repeat")
    rows = [r for r in rows if max(_processes(r))]
    few = [r for r in rows if max(_processes(r)) < FEW_PROCESSES]
    if few:
        lines.append(
            f"{len(few)} of {len(rows)} rows rest on fewer than {FEW_PROCESSES} processes: "
            "no useful interval; see --processes"
        )
    short = [r for r in timed if r.samples and len(r.samples.repetitions) < FEW_REPETITIONS]
    if short and len(short) == len(timed):
        lines.append(f"fewer than {FEW_REPETITIONS} repetitions in each process; use -r")
    wide = [row for row in rows if _spread(row) > HIGH_CV]
    if wide:
        worst = max(wide, key=_spread)
        lines.append(
            f"processes of {len(wide)} of {len(rows)} rows differ by more than {100 * HIGH_CV:.0f} % "
            f"(worst {100 * _spread(worst):.0f} %: {worst.backend} {worst.variant} {worst.layout}"
            f"{unusual(worst.weights, worst.dtype, worst.layout)})"
        )
    reasons = Counter(r.unstable for r in timed if r.unstable)
    lines += [
        f"unstable, {count} process{'es' * (count > 1)}: {why}" for why, count in reasons.items()
    ]
    return lines


def _processes(row: Row) -> tuple[int, int]:
    return len(row.prefill_by_process), len(row.decode_by_process)


def _spread(row: Row) -> float:
    """The larger coefficient of variation between processes; 0 where there is none."""
    return max(variation(row.prefill_by_process) or 0, variation(row.decode_by_process) or 0)


def _overloaded(result: BenchResult) -> bool:
    load, cpus = result.conditions.load_average_1m, result.device.cpu_count
    return load is not None and cpus is not None and load > cpus
