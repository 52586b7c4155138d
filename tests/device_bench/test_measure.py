"""The timing loop and the memory passes, in this process, over the runtime of known figures."""

import gc
import itertools

import numpy as np
import pytest

from device_bench import cold, measure, memory
from device_bench.self_test import MODEL, WORKSPACE_BYTES_PER_TOKEN, SelfTestRunner, write_bundle
from device_bench.stats import theil_sen
from device_bench.workload import Workload
from edgeqkv.artifact import read_artifact
from edgeqkv.cache import cache_spec
from edgeqkv.errors import RunError

linux = pytest.mark.skipif(not memory.supported(), reason="needs /proc/self/smaps_rollup")
KNOWN = cache_spec(MODEL).bytes_per_token


class Recorder:
    """Keeps what it was asked, in order; numpy only."""

    capacity = 100

    def __init__(self):
        self.calls, self.position = [], 0

    def reset(self):
        self.calls.append("reset")

    def prefill(self, ids):
        self.calls.append(("prefill", ids.tolist()))

    def decode(self, token):
        assert isinstance(token, int)
        assert not gc.isenabled()
        self.calls.append(("decode", token))


@pytest.fixture(params=["growing", "static"])
def bundle(request, tmp_path):
    path = write_bundle(tmp_path / request.param, request.param)
    return read_artifact(path), path


@pytest.mark.parametrize(("p", "n", "d"), [(4, 0, 0), (0, 3, 0), (0, 3, 5), (4, 0, 5), (2, 3, 5)])
def test_the_loop_runs_what_the_workload_says_and_nothing_else(p, n, d):
    runner, workload = Recorder(), Workload(p, n, d, 1, 1, 1, 0, 0)
    ids = np.arange(d + p + n)
    stamps = measure.run_once(runner, workload, ids)
    expected = ["reset"]
    expected += [("prefill", list(range(d)))] if d else []
    expected += [("prefill", list(range(d, d + p)))] if p else []
    expected += [("decode", i) for i in range(d + p, d + p + n)]
    assert runner.calls == expected
    assert len(stamps) == bool(p) + n
    assert all(a < b for a, b in itertools.pairwise((0, *stamps)))
    assert gc.isenabled()


def test_a_failure_leaves_the_collector_on():
    class Refuses(Recorder):
        def prefill(self, ids):
            raise RunError("no")

    with pytest.raises(RunError):
        measure.run_once(Refuses(), Workload(4, 0, 0, 1, 1, 1, 0, 0), np.arange(4))
    assert gc.isenabled()


def test_time_pass_keeps_every_sample(bundle):
    samples, engine, interpreted = measure.time_pass(*bundle, Workload(0, 5, 8, 1, 3, 1, 0, 0))
    assert (engine, interpreted) == ("self-test", False)
    assert samples.import_ns is None  # it has no SDK
    assert samples.load_ns >= 300e6
    assert len(samples.warmup) == 5
    assert [len(r) for r in samples.repetitions] == [5, 5, 5]
    gaps = [b - a for r in samples.repetitions for a, b in itertools.pairwise(r)]
    assert min(gaps) >= 2e6 - 50_000


@pytest.mark.skipif(not cold.supported, reason="no posix_fadvise here")
def test_a_cold_start_leaves_the_files_in_the_page_cache(bundle):
    """Else the next process, whose load is called warm, would read them from the disk."""
    artifact, folder = bundle
    found = measure.cold_pass(artifact, folder, Workload(0, 5, 8, 1, 3, 1, 0, 0))
    if found is None:
        pytest.skip("this file system is the page cache itself")
    assert found.load_ns >= 300e6
    assert all(cold.cached_pages(folder / name) for name in artifact.files)


def test_what_does_not_fit_is_refused(bundle):
    workload = Workload(0, 1, 4096, 1, 1, 1, 0, 0)
    for run in (measure.time_pass, measure.memory_pass):
        with pytest.raises(RunError, match="tg1 @ d4096 needs a context of 4097 tokens"):
            run(*bundle, workload)


@linux
def test_memory_pass_shows_where_the_cache_is_paid(bundle):
    artifact, path = bundle
    found = measure.memory_pass(artifact, path, Workload(1024, 8, 0, 1, 1, 1, 0, 0))
    loading = found.after_load.private_dirty - found.baseline.private_dirty
    filling = found.after_prefill.private_dirty - found.after_load.private_dirty
    per_token = KNOWN + WORKSPACE_BYTES_PER_TOKEN
    at_load, at_fill = (4096, 0) if artifact.cache_mode == "static" else (0, 1024)
    noise = 1 << 20
    assert loading == pytest.approx(at_load * per_token, abs=noise)
    assert filling == pytest.approx(at_fill * per_token, abs=noise)
    assert found.after_decode is not None
    assert found.peak_rss >= found.after_prefill.rss


@linux
def test_depth_pass_reads_back_the_bytes_per_token(tmp_path, monkeypatch):
    monkeypatch.setattr(SelfTestRunner, "decode_ns", 0)
    path = write_bundle(tmp_path / "b", "growing")
    points = measure.depth_pass(read_artifact(path), path, Workload(0, 0, 0, 1, 1, 1, 0, 0))
    tokens = [p.tokens for p in points]
    assert len(points) >= 6
    assert [p.cache_bytes for p in points] == [KNOWN * t for t in tokens]
    process = theil_sen(tokens, [p.process_bytes for p in points]).value
    assert process == pytest.approx(KNOWN + WORKSPACE_BYTES_PER_TOKEN, rel=0.03)


@linux
def test_capacity_point_is_the_whole_static_cache(tmp_path):
    path = write_bundle(tmp_path / "b", "static")
    workload = Workload(0, 0, 0, 1, 1, 1, 0, 0)
    (point,) = measure.capacity_point(read_artifact(path), path, workload, 2048)
    assert (point.tokens, point.cache_bytes) == (2048, KNOWN * 2048)
