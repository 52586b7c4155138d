"""ExecuTorch bundles run: parity with eager, capacities, refusals, and where the cache really is."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("executorch.exir")

from device_bench import malloc_chunks
from device_bench.memory import WORKER_ENV
from device_bench.runners.run_executorch import load
from edgeqkv.errors import BundleError, RunError, UnsupportedError
from edgeqkv.runner import open_runner
from tests.et_bundles import big, et_bundle
from tests.parity import assert_closes, assert_parity, random_ids
from tests.variants import LAYOUTS

ROOT = Path(__file__).parents[2]


def run(bundle, capacity=None, threads=1):
    _, artifact, directory = bundle
    return load(artifact, directory, threads=threads, capacity=capacity or artifact.cache.capacity)


def eager(decoder, ids):
    return decoder(torch.from_numpy(ids)[None])[0].numpy()


@pytest.mark.parametrize(("variant", "layout"), LAYOUTS)
def test_plain_matches_eager(variant, layout):
    bundle = et_bundle(variant, layout)
    runner = run(bundle)
    assert_parity(runner, bundle[0], prompt=11, steps=16)
    assert_parity(runner, bundle[0], prompt=1, steps=16)  # after reset, from almost nothing
    assert_closes(runner)


@pytest.mark.parametrize(
    ("variant", "layout"), [("q-gqa", "shared"), ("gqa", "separate"), ("identity", "separate")]
)
def test_custom_matches_eager(variant, layout):
    bundle = et_bundle(variant, layout, "custom")
    runner = run(bundle)
    assert_parity(runner, bundle[0], prompt=11, steps=16)
    assert_parity(runner, bundle[0], prompt=1, steps=16)


def test_not_causal_matches_eager():
    bundle = et_bundle("(q=k-v)+")
    runner = run(bundle)
    ids = random_ids(bundle[0], 23)
    for length in (23, 1, 9):
        np.testing.assert_allclose(
            runner.prefill(ids[:length]), eager(bundle[0], ids[:length])[-1], atol=1e-3
        )
    assert runner.cache_regions() == []
    with pytest.raises(RunError, match="not causal"):
        runner.decode(1)


def test_capacities_and_a_prefill_longer_than_the_chunk():
    decoder, artifact, directory = big()
    assert artifact.capacities == (128, 256, 512)
    ids = random_ids(decoder, 300)
    expected = eager(decoder, ids)
    small = open_runner(directory, capacity=100)
    assert small.capacity == 128
    np.testing.assert_allclose(small.prefill(ids[:128]), expected[127], atol=1e-3)
    with pytest.raises(RunError, match="context overflow: 128 tokens held"):
        small.decode(1)
    assert small.position == 128
    large = open_runner(directory)
    assert large.capacity == 512 > 2 * artifact.prefill_chunk
    np.testing.assert_allclose(large.prefill(ids[:290]), expected[289], atol=1e-3)
    got = [large.decode(int(token)) for token in ids[290:]]
    np.testing.assert_allclose(np.stack(got), expected[290:], atol=1e-3)


@pytest.mark.parametrize("attention", ["plain", "custom"])
def test_stale_rows_are_never_read(attention):
    bundle = et_bundle("q-gqa", "shared", attention)
    ids = random_ids(bundle[0], 12)
    fresh = run(bundle)
    expected = [fresh.prefill(ids[:5]), *(fresh.decode(int(t)) for t in ids[5:])]
    used = run(bundle)
    used.prefill(random_ids(bundle[0], 40, seed=9))
    used.reset()
    got = [used.prefill(ids[:5]), *(used.decode(int(t)) for t in ids[5:])]
    np.testing.assert_array_equal(np.stack(got), np.stack(expected))


def test_refusals():
    bundle = et_bundle("q-gqa", "shared")
    runner = run(bundle)
    for ids, message in (
        ([], "no tokens"),
        ([101], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([1] * 41, "context overflow"),
    ):
        with pytest.raises(RunError, match=message):
            runner.prefill(np.array(ids, np.int64))
    assert runner.position == 0
    assert_parity(runner, bundle[0])  # a refusal leaves the runner usable
    artifact = dataclasses.replace(bundle[1], formulation="other")
    with pytest.raises(UnsupportedError, match="other"):
        load(artifact, bundle[2], threads=1, capacity=40)


def test_a_damaged_program_is_one_clear_line(tmp_path):
    _, artifact, directory = et_bundle("q-gqa", "shared")
    data = (directory / artifact.entry).read_bytes()
    for name, bad in (("cut", data[:3000]), ("foreign", b"not a program" * 400)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / artifact.entry).write_bytes(bad)
        with pytest.raises(
            BundleError, match=r"cannot be loaded by executorch|is not an ExecuTorch program"
        ) as e:
            load(artifact, folder, threads=1, capacity=40)
        assert "\n" not in str(e.value)


def test_threads_are_honoured():
    from executorch.extension.pybindings import portable_lib

    bundle = et_bundle("q-gqa", "shared")
    for threads in (2, 1):
        assert_parity(run(bundle, threads=threads), bundle[0])
        assert portable_lib._threadpool_get_thread_count() == threads
        assert torch.get_num_threads() == threads


_REGIONS = """
import json, os, sys, numpy as np
from edgeqkv.runner import open_runner
ids = np.array(json.loads(sys.argv[2]))
out = {}
for capacity in (128, 256, 512):
    runner = open_runner(sys.argv[1], capacity=capacity)
    runner.prefill(ids)
    regions = runner.cache_regions()
    rows = None
    if regions:
        (address, nbytes), = regions
        with open("/proc/self/mem", "rb", 0) as memory:
            held = np.frombuffer(os.pread(memory.fileno(), nbytes, address), np.float32)
        rows = held.reshape(2, 2, capacity, 16)[0, :, :ids.size].tolist()
    out[capacity] = [regions, rows]
print(json.dumps(out))
"""


def test_cache_regions_are_the_cache():
    """Two layers x [2 heads, capacity, 16] float32: the rows found there are layer 0's keys."""
    decoder, artifact, directory = big()
    ids = random_ids(decoder, 7)
    result = subprocess.run(
        [sys.executable, "-c", _REGIONS, str(directory), json.dumps(ids.tolist())],
        env={**os.environ, **WORKER_ENV},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    found = json.loads(result.stdout)
    x = decoder.wte(torch.from_numpy(ids)) + decoder.wpe(torch.arange(7))
    block = decoder.h[0]
    keys = block.attn.k_proj(block.ln_1(x)).view(7, 2, 16).transpose(0, 1).numpy()
    assert found["128"][0] is None  # 32 KiB: below the threshold, so inside the heap
    for capacity in (256, 512):
        regions, rows = found[str(capacity)]
        assert [nbytes for _, nbytes in regions] == [capacity * artifact.cache.bytes_per_token]
        assert artifact.details["cache_arena_bytes"][str(capacity)] == regions[0][1]
        np.testing.assert_allclose(np.array(rows), keys, atol=1e-4)


_CHUNKS = """
import ctypes
from device_bench import malloc_chunks
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
small = [libc.malloc(60_000) for _ in range(40)]
for block in small[:-1]:
    libc.free(block)  # leaves one hole of 2.3 MB in the heap
with malloc_chunks.fresh(300_000) as blocks:
    made = [libc.malloc(n) for n in (300_000, 500_000, 300_001, 1_000)]
assert sorted(blocks) == sorted([made[0], made[2]]), (blocks, made)
assert made[1] in malloc_chunks.find(500_000)
assert malloc_chunks.find(123_457_000) == []
with malloc_chunks.fresh(50_000) as blocks:  # below the threshold: not told apart
    libc.malloc(50_000)
assert blocks == []
print("ok")
"""


def test_large_malloc_blocks_are_found():
    result = subprocess.run(
        [sys.executable, "-c", _CHUNKS],
        env={**os.environ, **WORKER_ENV},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.stdout.strip() == "ok", result.stderr
    assert malloc_chunks.find(1 << 40) == []
    with malloc_chunks.fresh(1 << 20) as blocks:  # this process has the usual threshold
        pass
    assert blocks == []
