"""The command, end to end, over runtimes of known figures and known faults."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from device_bench import memory, self_test
from device_bench.cold import evict
from device_bench.result import read_results
from tests.device_bench import faulty

linux = pytest.mark.skipif(not memory.supported(), reason="needs /proc/self/smaps_rollup")
ONE = ("--processes", "1")
QUICK = ("-p", "16", "-n", "4", "-r", "2", "--seed", "1", *ONE)


@pytest.fixture
def env(tmp_path):
    return faulty.plugin(tmp_path / "plugin")


@linux
@pytest.mark.alone
def test_self_test(cli):
    """Bytes at once; each latency within its limit in one of three runs, for a neighbour disturbs one."""
    passed = set()
    for _ in range(3):
        checks = json.loads(cli("bench", "--self-test", "--json").stdout)
        assert len(checks) == 7
        for check in checks:
            assert check["passed"] or check["unit"] != "B/token", check
            # A crowded machine runs late, never early.
            allowance = check["allowed"]
            assert check["reported"] >= check["known"] - allowance, check
        passed |= {i for i, check in enumerate(checks) if check["passed"]}
        if len(passed) == len(checks):
            return
    late = [c for i, c in enumerate(checks) if i not in passed]
    assert os.getloadavg()[0] >= os.cpu_count(), late
    assert all(c["reported"] <= 2 * c["known"] for c in late), late


def test_every_way_to_fail_is_a_line_and_the_sweep_goes_on(cli, tmp_path, env):
    reasons = {
        "crash": "crashed with SIGSEGV",
        "oom": "killed by SIGKILL",
        "exit": "ended without a result, exit status 3: the SDK gave up",
        "hang": "hung: no result after 15 s (--timeout)",
        "refuse": "operator Foo is not implemented",
    }
    names = [*reasons, "fine"]
    bundles = [faulty.bundle(tmp_path / name, name) for name in names]
    out = tmp_path / "r.jsonl"
    flags = ("-p", "16", "-n", "0", "-r", "2", "--no-memory", "--timeout", "15", "-o", out, *ONE)
    done = cli("bench", *bundles, *flags, env=env, check=0)
    results = {r.artifact.name: r for r in read_results(out)[0]}
    assert set(results) == set(names)
    for name, words in reasons.items():
        assert results[name].status == "failed"
        assert words in results[name].reason
        assert results[name].samples is None
        assert f"failed: faulty Q-GQA-4 shared pp16, 1 thread: {words[:20]}" in done.stdout
    fine = results["fine"]
    assert (fine.status, fine.reason, fine.memory) == ("ok", None, None)
    assert fine.cache.bytes_per_token.measured_cache is None
    assert "not measured: faulty Q-GQA-4 shared: not asked for (--no-memory)" in done.stdout
    assert len(fine.samples.repetitions) == 2


@linux
def test_measurements_are_complete(cli, tmp_path, env):
    bundle = faulty.bundle(tmp_path / "fine", "fine")
    out = tmp_path / "r.jsonl"
    done = cli("bench", bundle, *QUICK, "-d", "0,64", "-o", out, "--json", env=env, check=0)
    results, _ = read_results(out)
    assert json.loads(done.stdout) == [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r.workload.label for r in results) == ["pp16", "pp16 @ d64", "tg4", "tg4 @ d64"]
    assert len({r.run_id for r in results}) == 1
    assert {r.workload.seed for r in results} == {1}
    for r in results:
        assert (r.status, r.artifact.engine, r.artifact.interpreted) == ("ok", "self-test", False)
        figures = r.cache.bytes_per_token
        assert figures.formula == figures.declared == figures.measured_cache == 8192
        assert figures.measured_process == pytest.approx(9216, rel=0.05)
        assert (figures.over, figures.reason) == ("depth", None)
        assert figures.ci95.measured_cache == (8192, 8192)
        assert len(figures.points) >= 6
        assert r.memory.peak_rss >= r.memory.after_load.rss
        assert (r.memory.after_decode is None) == (r.workload.n_gen == 0)
        assert r.conditions.threads == 1
        if evict([bundle / "manifest.json"]):  # a file system on a disk
            assert min(r.cold.load_ns, r.cold.first_call_ns) > 0


@linux
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("double", "16384 measured in the cache, 8192 formula"),
        ("declares-double", "16384 declared by the artifact, 8192 formula"),
    ],
)
def test_a_contradiction_is_invalid_and_exits_5(cli, tmp_path, env, fault, words):
    bundle, out = faulty.bundle(tmp_path / "b", fault), tmp_path / "r.jsonl"
    done = cli("bench", bundle, "-p", "8", "-n", "0", "-r", "1", *ONE, "-o", out, env=env, check=5)
    (result,) = read_results(out)[0]
    assert result.status == "invalid"
    assert words in result.reason
    line = f"invalid: faulty Q-GQA-4 shared pp8, 1 thread: bytes per token: {words}"
    assert line in " ".join(done.stdout.split())  # it goes over two lines
    assert result.samples is not None
    assert not result.incomplete  # a finding, which --resume does not run again


@linux
@pytest.mark.parametrize(
    ("fault", "changes", "reason"),
    [
        ("silent", {}, "the runtime does not tell where its cache is"),
        ("interpreted", {}, "interpreted: this process's memory says nothing"),
        (
            "few",
            {"cache_mode": "static", "capacities": [4096]},
            "offers 1 capacities, a slope needs 3",
        ),
    ],
)
def test_what_cannot_be_told_is_null_with_the_reason(cli, tmp_path, env, fault, changes, reason):
    bundle, out = faulty.bundle(tmp_path / "b", fault, **changes), tmp_path / "r.jsonl"
    cli("bench", bundle, "-p", "8", "-n", "0", "-r", "1", *ONE, "-o", out, env=env, check=0)
    (result,) = read_results(out)[0]
    figures = result.cache.bytes_per_token
    assert result.status == "ok"
    assert (figures.measured_cache, figures.declared) == (None, 8192)
    assert reason in figures.reason
    assert (result.memory is None) == (fault == "interpreted")
    assert result.artifact.interpreted == (fault == "interpreted")
    assert (figures.measured_process is not None) == (fault == "silent")


def test_too_long_for_the_context_is_one_failed_line_and_exits_1_when_alone(cli, tmp_path):
    """Nothing runs, whatever runs it: the sweep knows the context of a bundle."""
    out = tmp_path / "r.jsonl"
    bundle = self_test.write_bundle(tmp_path / "b", "growing", backend="unheard-of")
    done = cli("bench", bundle, "-p", "0", "-n", "9", "-d", "4090", "-o", out, check=1)
    (result,) = read_results(out)[0]
    assert result.status == "failed"
    assert "tg9 @ d4090 needs a context of 4099 tokens, the bundle holds 4096" in result.reason
    assert done.stdout.count("\n") == 1
    assert result.reason in done.stdout
    assert done.stderr.startswith("[1/1] bench: ")


def test_interrupt_keeps_what_is_finished_and_resume_runs_the_rest(cli, tmp_path, env):
    bundle, out = faulty.bundle(tmp_path / "b", "fine"), tmp_path / "r.jsonl"
    flags = ["bench", bundle, "-p", "8-80+8", "-n", "0", "-r", "1", *ONE, "--no-memory", "-o", out]
    process = _start([*flags, "--seed", "3"], env)
    _wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "go on with --resume" in stderr
    kept, warning = read_results(out)
    assert warning is None
    assert 2 <= len(kept) < 10
    out.write_bytes(out.read_bytes() + b'{"schema_version": 1, "run')  # a kill in mid-write

    refused = cli(*flags, env=env, check=2)
    assert "give --resume" in refused.stderr
    done = cli(*flags, "--resume", env=env, check=0)
    assert "was cut short" in done.stderr
    results, warning = read_results(out)
    assert warning is None
    assert results[: len(kept)] == kept
    assert Counter(r.workload.n_prompt for r in results) == Counter(range(8, 81, 8))
    cli(*flags, "--resume", env=env, check=0)
    assert read_results(out)[0] == results


def test_resume_runs_again_what_failed_or_was_half_measured(cli, tmp_path, env):
    few = {"cache_mode": "static", "capacities": [4096]}
    names = ("short-of-memory", "large-to-audit")
    bundles = [faulty.bundle(tmp_path / name, name, **few) for name in names]
    out = tmp_path / "r.jsonl"
    flags = ["bench", *bundles, "-p", "8", "-n", "0", "-r", "1", *ONE, "-o", out]
    cli(*flags, env={**env, "FAULTY_SHORT": "1"}, check=0)
    before = {r.artifact.name: r for r in read_results(out)[0]}
    assert (before[names[0]].status, before[names[1]].status) == ("failed", "ok")
    assert before[names[1]].cache.bytes_per_token.reason.startswith("declared: killed by SIGKILL")

    kept = out.read_bytes()
    done = cli(*flags, "--no-memory", "--resume", env={**env, "FAULTY_SHORT": "1"}, check=0)
    assert "1 failed earlier, run again\n" in done.stderr
    done = cli(*flags, "--resume", env=env, check=0)
    assert "1 failed and 1 half measured earlier, run again\n" in done.stderr
    results, _ = read_results(out)
    assert sorted(r.artifact.name for r in results) == sorted(names)
    for r in results:
        assert (r.status, r.cache.bytes_per_token.declared) == ("ok", 8192)
        assert not r.incomplete
    assert out.read_bytes().startswith(kept)  # lines are added, none is changed
    assert out.read_bytes().count(b"\n") == 5
    done = cli(*flags, "--resume", env=env, check=0)
    assert "again" not in done.stderr
    assert out.read_bytes().count(b"\n") == 5


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_sweep_leaves_no_worker_behind(tmp_path, env, ending):
    bundle, out = faulty.bundle(tmp_path / "b", "hang"), tmp_path / "r.jsonl"
    process = _start(["bench", bundle, "-n", "0", "--no-memory", "-o", out], env)
    parent = psutil.Process(process.pid)
    _wait_for(parent.children)
    (worker,) = parent.children()
    # once it sits in the sleep it has set itself up; before, the kernel may not know its wish
    _wait_for(
        lambda: worker.status() == "sleeping" and worker.num_threads() >= 1 and _loaded(worker)
    )
    assert out.read_bytes() == b""
    process.send_signal(ending)
    _, stderr = process.communicate(timeout=60)
    psutil.wait_procs([worker], timeout=30)
    assert not worker.is_running() or worker.status() == "zombie"
    if ending == signal.SIGINT:  # nothing was finished: no empty file is left to go on with
        assert not out.exists()
        assert stderr == "error: interrupted\n"


def _loaded(worker):
    return any("faulty" in f for f in (m.path for m in worker.memory_maps())) or (
        worker.memory_info().rss > 30 << 20
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "no bundle given"),
        (["B", "-o", "r.html"], "must end in .jsonl, .json, .csv, .md"),
        (["B", "-o", ""], "-o names no file; give one that ends in .jsonl"),
        (["B", "-o", "r.csv", "--resume"], "--resume needs -o FILE.jsonl"),
        (["B", "--max-cv", "few"], "--max-cv is 'few'; it must be a percentage"),
        (["B", "--max-cv", "5%", "-r", "1"], "--max-cv needs 2 repetitions"),
        (["B", "--resume"], "--resume needs -o"),
        (["B", "-d", "9-1"], "runs backwards"),
        (["B", "-p", "0", "-n", "0"], "both -p and -n are 0"),
        (["B", "-t", "0"], "-t is 0"),
        (["B", "-t", "1,1000000", "-o", "r.csv"], "-t is 1000000, but --device local has"),
    ],
)
def test_misuse_is_one_line(cli, flags, words):
    done = cli("bench", "--seed", "1", *flags, check=2)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_damaged_bundle_stops_the_sweep_before_it_starts(cli, tmp_path, env):
    good = faulty.bundle(tmp_path / "good", "fine")
    bad = faulty.bundle(tmp_path / "bad", "fine")
    (bad / "program.txt").write_text("something else entirely")
    out = tmp_path / "r.jsonl"
    done = cli("bench", good, bad, "-o", out, env=env, check=1)
    assert "program.txt" in done.stderr
    assert not out.exists()
    out.write_text("what an hour brought\n")
    cli("bench", good, bad, "-o", out, "--overwrite", env=env, check=1)
    assert out.read_text() == "what an hour brought\n"


@linux
def test_a_full_disk_names_the_file(cli, tmp_path):
    bundle = self_test.write_bundle(tmp_path / "b", "growing", backend="unheard-of")
    out = tmp_path / "r.jsonl"
    out.symlink_to("/dev/full")
    done = cli("bench", bundle, "-p", "8", "-n", "0", *ONE, "-o", out, check=1)
    assert f"error: {out}: No space left on device; free some space" in done.stderr
    assert out.is_symlink()


def test_a_backend_without_a_runner_is_a_failed_line(cli, tmp_path):
    bundle = self_test.write_bundle(tmp_path / "b", "growing", backend="unheard-of")
    out = tmp_path / "r.jsonl"
    cli("bench", bundle, "-n", "0", "-r", "1", *ONE, "-o", out, check=1)
    (result,) = read_results(out)[0]
    assert "no runner for backend 'unheard-of'" in result.reason


def _start(arguments, env):
    return subprocess.Popen(
        [sys.executable, "-c", "from edgeqkv.cli import main; main()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def _wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
