"""One bundle against another, or a sweep against an earlier one: ratios with 95 % intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from device_bench.figures import Row, device_label
from device_bench.result import BenchResult
from device_bench.stats import ratio_interval
from edgeqkv.errors import UsageError

Interval = tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One figure of a row beside the baseline's. ratio: value / base. ci95: of the ratio; None where
    one process, or one reading, cannot tell. worse: how much worse than the baseline, as a share:
    0.05 is 5 % more bytes, or 5 % more time per token; below 0 is better. worse_ci95 likewise."""

    who: str
    against: str
    device: str
    base_device: str
    test: str
    figure: str
    value: float
    base: float
    ratio: float
    ci95: Interval
    worse: float
    worse_ci95: Interval

    def regressed(self, limit: float) -> bool | None:
        """Worse by more than ``limit``, the whole interval included; None without an interval."""
        return None if self.worse_ci95 is None else min(self.worse, self.worse_ci95[0]) > limit


@dataclasses.dataclass(frozen=True)
class Figure:
    """per_test: differs by threads and depth. less_is_better. read: the figure of a row; interval:
    of the ratio of two rows' figures."""

    name: str
    per_test: bool
    less_is_better: bool
    read: Callable[[Row], float | None]
    interval: Callable[[Row, Row], Interval]


def _exact(field: str) -> Callable[[Row, Row], Interval]:
    def interval(row: Row, base: Row) -> Interval:
        ratio = getattr(row, field) / getattr(base, field)
        return ratio, ratio

    return interval


def _slopes(field: str) -> Callable[[Row, Row], Interval]:
    def interval(row: Row, base: Row) -> Interval:
        mine, theirs = getattr(row, field), getattr(base, field)
        if mine is None or theirs is None or min(*mine, *theirs) <= 0:
            return None
        return mine[0] / theirs[1], mine[1] / theirs[0]

    return interval


FIGURES = (
    Figure("file bytes", False, True, lambda r: r.nbytes, _exact("nbytes")),
    Figure("cache B/token", False, True, lambda r: r.measured_cache, _slopes("cache_ci95")),
    Figure("process B/token", False, True, lambda r: r.measured_process, _slopes("process_ci95")),
    Figure("peak RSS", True, True, lambda r: r.peak_rss, lambda row, base: None),
    Figure(
        "prefill tok/s",
        True,
        False,
        lambda r: r.prefill_tok_s,
        lambda row, base: ratio_interval(row.prefill_by_process, base.prefill_by_process),
    ),
    Figure(
        "decode tok/s",
        True,
        False,
        lambda r: r.decode_tok_s,
        lambda row, base: ratio_interval(row.decode_by_process, base.decode_by_process),
    ),
)


def label(row: Row) -> str:
    """``onnx Q-MQA shared``, with what is not the usual float32."""
    unusual = [f"{row.weights} weights"] * (row.weights != "fp32")
    unusual += [f"{row.dtype} cache"] * (row.dtype != "fp32" and row.layout != "none")
    unusual += [f"({row.driver})"] * (row.driver != "python")
    return " ".join([row.backend, row.variant, row.layout, *unusual])


def test_label(row: Row) -> str:
    """``pp128, tg32``: two tests; ``pp128+tg32``: one, whose decode follows the prompt."""
    parts = [f"pp{row.n_prompt}"] * bool(row.n_prompt) + [f"tg{row.n_gen}"] * bool(row.n_gen)
    return ("+" if row.decode_depth > row.depth else ", ").join(parts)


def workload_label(row: Row) -> str:
    """``pp128, tg32 @ d512, 2 threads``."""
    depth = f" @ d{row.depth}" if row.depth else ""
    return f"{test_label(row)}{depth}, {row.threads} thread{'s' * (row.threads > 1)}"


def against_bundle(rows: Sequence[Row], name: str) -> list[Comparison]:
    """Every other bundle beside the one that ``name`` names, at the same test.

    ``name`` is words out of a bundle's name, backend, variant, layout, weights, cache dtype.

    Raises:
        UsageError: no bundle, or more than one, has them all.
    """
    wanted = name.lower().split()
    found = [r for r in rows if wanted and all(w in _words(r) for w in wanted)]
    labels = sorted({f"{label(r)} ({r.name})" for r in found or rows})
    if not found:
        raise UsageError(f"--baseline {name!r} names no row; there are: {'; '.join(labels)}")
    if len({r.sha256 for r in found}) > 1:
        raise UsageError(f"--baseline {name!r} names {len(labels)} rows: {'; '.join(labels)}")
    return _compare(rows, _finder(found, _test), found[0])


def against_file(rows: Sequence[Row], earlier: Sequence[Row]) -> list[Comparison]:
    """Every row beside the same one of an earlier sweep.

    Raises:
        UsageError: no row has its like there.
    """
    found = _compare(rows, _finder(earlier, lambda r: (*_identity(r), *_test(r))), None)
    if not found:
        raise UsageError(
            "no row of the results is in the baseline; both need the same bundles and tests: "
            f"{'; '.join(sorted({f'{label(r)} {workload_label(r)}' for r in earlier}))}"
        )
    return found


def _finder(
    bases: Sequence[Row], key: Callable[[Row], tuple[object, ...]]
) -> Callable[[Row], Row | None]:
    """What finds the base of a row: on its own device where there is one."""
    anywhere = {key(b): b for b in bases}
    here = {(b.device, b.driver, *key(b)): b for b in bases}
    return lambda row: here.get((row.device, row.driver, *key(row))) or anywhere.get(key(row))


def _compare(
    rows: Sequence[Row], base_of: Callable[[Row], Row | None], base_bundle: Row | None
) -> list[Comparison]:
    found, seen = [], set()
    for row in rows:
        base = base_of(row)
        if base is None or (base_bundle and base_bundle.sha256 == row.sha256):
            continue
        for figure in FIGURES:
            once = (row.sha256, row.device, row.driver, figure.name)
            if not figure.per_test and once in seen:
                continue
            value, other = figure.read(row), figure.read(base)
            if value is not None and other:
                seen.add(once)
                found.append(_comparison(row, base, figure, value, other))
    return found


def _comparison(row: Row, base: Row, figure: Figure, value: float, other: float) -> Comparison:
    ratio, ci95 = value / other, figure.interval(row, base)
    if figure.less_is_better or not ratio:
        worse, worse_ci95 = ratio - 1, ci95 and (ci95[0] - 1, ci95[1] - 1)
    else:
        worse, worse_ci95 = 1 / ratio - 1, ci95 and (1 / ci95[1] - 1, 1 / ci95[0] - 1)
    crossed = row.device != base.device
    who = f"{label(row)}, {row.device}" if crossed else label(row)
    against = f"{label(base)}, {base.device}" if crossed else label(base)
    test = workload_label(row) if figure.per_test else ""
    what = (figure.name, value, other, ratio, ci95, worse, worse_ci95)
    return Comparison(who, against, row.device, base.device, test, *what)


def _words(row: Row) -> set[str]:
    fields = (row.name, row.backend, row.variant, row.layout, row.weights, row.dtype)
    return {word for f in fields for word in (f.lower(), *f.lower().split())}


def _identity(row: Row) -> tuple[str, ...]:
    """A bundle across two exports of it: its files may differ, what it is may not."""
    return (row.name, label(row), row.weights, row.dtype, row.formulation)


def _test(row: Row) -> tuple[int | None, ...]:
    return (row.threads, row.depth, row.decode_depth, row.n_prompt, row.n_gen)


def mixtures(results: Sequence[BenchResult]) -> list[str]:
    """What was not the same for all results of a device and changes its figures, a line each."""
    facts: dict[str, Callable[[BenchResult], object]] = {
        "engine": lambda r: r.conditions.engine,
        "governor": lambda r: r.conditions.governor,
        "power source": lambda r: r.conditions.power,
        "CPU affinity": lambda r: r.conditions.affinity,
        "huge pages": lambda r: r.conditions.huge_pages,
    }
    lines = []
    for device in devices(results):
        own = [r for r in results if device_label(r.device) == device]
        for name, read in facts.items():
            found = sorted({str(read(r) or "unknown") for r in own})
            if len(found) > 1:
                lines.append(f"{device} with {len(found)} of {name}: {'; '.join(found)}")
    return lines


def devices(results: Sequence[BenchResult]) -> list[str]:
    return sorted({device_label(r.device) for r in results})


def load_change(results: Sequence[BenchResult], earlier: Sequence[BenchResult]) -> str | None:
    """A line when one of two sweeps shared its CPUs with half of them more than the other did.

    Intervals hold what a machine does during a sweep, not what it did an hour before.
    """
    found = [
        [x for r in rs if (x := r.conditions.load_average_1m) is not None]
        for rs in (results, earlier)
    ]
    cpus = min((r.device.cpu_count or 1 for r in (*results, *earlier)), default=1)
    if not all(found):
        return None
    mine, theirs = (sum(loads) / len(loads) for loads in found)
    if abs(mine - theirs) <= cpus / 2:
        return None
    return f"load average {mine:.1f}, the baseline's was {theirs:.1f}: speeds are not comparable"
