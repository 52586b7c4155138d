"""Limits that make a process run again, and what is warned of."""

import dataclasses

import pytest

from device_bench import conditions, stability
from device_bench.bandwidth import limit, measure
from device_bench.conditions import Bandwidth
from device_bench.figures import fold
from device_bench.result import Samples, read_results
from device_bench.stability import Limits, parse_share, warnings
from edgeqkv.errors import UsageError
from tests.device_bench import faulty
from tests.device_bench.results import result

STEADY = Samples(None, 1, 1, (), ((100,), (101,), (99,)))
WILD = Samples(None, 1, 1, (), ((100,), (150,), (60,)))


def test_which_limit_was_broken():
    limits = Limits(max_cv=0.05, max_temp_c=70)
    assert limits.broken(STEADY, 50) is limits.broken(STEADY, None) is None
    assert limits.broken(WILD, 50) == "repetitions vary by 43.6%, --max-cv is 5.0%"
    assert limits.broken(STEADY, 71) == "71 C, --max-temp-c is 70"
    assert stability.NO_LIMITS.broken(WILD, 999) is None
    assert limits.broken(Samples(None, 1, 1, (), ((100,),)), None) is None


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("5", 0.05), (" 2.5 % ", 0.025)])
def test_shares(text, share):
    assert parse_share(text, "--max-cv") == share
    with pytest.raises(UsageError, match="--max-cv is '-1'"):
        parse_share("-1", "--max-cv")


def test_a_device_is_used_when_it_has_cooled_down_or_never_will(monkeypatch):
    monkeypatch.setattr(stability, "_WAIT_STEP_S", 0.001)
    readings = iter([90.0, 80.0, 69.0, 50.0])
    Limits(max_temp_c=70).wait(lambda: next(readings))
    assert next(readings) == 50
    monkeypatch.setattr(stability, "LONGEST_WAIT_S", 0.01)
    Limits(max_temp_c=70).wait(lambda: 90.0)


def test_the_hottest_zone_of_the_cpu_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(conditions, "_THERMAL", tmp_path)
    assert conditions.temperature_c() is None
    for i, (kind, value) in enumerate(
        [("battery", "99000"), ("cpu-0-1", "41000"), ("cpu-1-1", "43500"), ("gpu", "junk")]
    ):
        zone = tmp_path / f"thermal_zone{i}"
        zone.mkdir()
        (zone / "type").write_text(kind)
        (zone / "temp").write_text(value)
    assert conditions.temperature_c() == 43.5


def test_a_process_that_is_never_steady_is_run_three_times_and_marked(cli, tmp_path):
    env = faulty.plugin(tmp_path / "plugin")
    bundle, out = faulty.bundle(tmp_path / "b", "fine"), tmp_path / "r.jsonl"
    flags = ("-p", "16", "-n", "0", "-r", "2", "--processes", "1", "--no-memory", "--max-cv", "0%")
    done = cli("bench", bundle, *flags, "-o", out, env=env, check=0)
    (line,) = read_results(out)[0]
    assert (line.status, line.conditions.attempts, line.conditions.max_cv) == ("ok", 3, 0)
    assert line.unstable.endswith("--max-cv is 0.0%")
    assert len(line.discarded) == 2
    assert len({s.repetitions for s in (*line.discarded, line.samples)}) == 3
    assert "warning: unstable, 1 process: repetitions vary by" in done.stdout
    if conditions.temperature_c() is None:
        refused = cli("bench", bundle, *flags, "--max-temp-c", "70", env=env, check=2)
        assert "lets nobody read its temperature" in refused.stderr


def test_steady_processes_need_no_second_run_and_files_of_other_kinds_are_whole(cli, tmp_path):
    env = faulty.plugin(tmp_path / "plugin")
    bundle, out = faulty.bundle(tmp_path / "b", "fine"), tmp_path / "r.csv"
    flags = (
        "-p",
        "16",
        "-n",
        "0",
        "-r",
        "2",
        "--processes",
        "2",
        "--no-memory",
        "--max-cv",
        "900%",
    )
    done = cli("bench", bundle, *flags, "-o", out, env=env, check=0)
    header, row = out.read_text().splitlines()
    assert header.startswith("name,backend")
    assert row.startswith("fine,faulty")
    assert "[2/2] bench" in done.stderr
    assert "bench" not in done.stdout
    assert "exists; give --overwrite" in cli("bench", bundle, "-o", out, env=env, check=2).stderr


def test_warnings_name_what_will_not_repeat(tmp_path):
    line = result(tmp_path / "b", gen=4)
    quiet = dataclasses.replace(line.conditions, load_average_1m=0.0, governor="performance")
    reps = (line.samples.repetitions[0],) * 3
    steady = dataclasses.replace(
        line, conditions=quiet, samples=dataclasses.replace(line.samples, repetitions=reps)
    )
    good = [
        dataclasses.replace(steady, workload=dataclasses.replace(line.workload, process=p))
        for p in range(3)
    ]
    assert warnings(good, fold(good)) == []
    crowd = [dataclasses.replace(r.workload, n_threads=999) for r in good]
    many = [dataclasses.replace(r, workload=w) for r, w in zip(good, crowd, strict=True)]
    assert "more threads than CPUs during 3 of 3" in warnings(many, fold(many))[0]
    slow = dataclasses.replace(line.samples, repetitions=(tuple(2 * t for t in reps[0]),) * 3)
    drifted = [*good[:2], dataclasses.replace(good[2], samples=slow)]
    (words,) = warnings(drifted, fold(drifted))
    assert "processes of 1 of 1 rows differ by more than 5 %" in words
    assert "fewer than 3 processes" in warnings(good[:2], fold(good[:2]))[0]


def test_this_machine_reads_at_a_plausible_speed():
    sizes = (1 << 20, 64 << 20)
    found = measure([1, 2], sizes)
    assert [(b.n_threads, b.nbytes) for b in found] == [(t, n) for t in (1, 2) for n in sizes]
    assert all(1e8 < b.bytes_per_s < 3e12 for b in found)


def test_the_limit_lies_between_the_measured_sizes():
    known = [Bandwidth(1, 1 << 20, 40e9), Bandwidth(1, 4 << 20, 20e9), Bandwidth(2, 1 << 20, 80e9)]
    assert limit(known, 1, 2 << 20) == pytest.approx(30e9)
    assert limit(known, 1, 1) == 40e9
    assert limit(known, 1, 1 << 40) == 20e9
    assert limit(known, 3, 1 << 20) is limit(None, 1, 1 << 20) is None
