"""The ONNX runner: where rows go, what a step touches, what is refused, what memory it holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from device_bench.memory import resident_bytes
from device_bench.runners.run_onnx import OnnxRunner, chunk_tokens, load
from edgeqkv.errors import RunError, UnsupportedError
from edgeqkv.runner import open_runner
from tests.bundles import make_bundle
from tests.onnx_bundles import decoder_of, onnx_bundle
from tests.parity import assert_closes, assert_parity, random_ids
from tests.variants import random_decoder, spec

CASES = [
    ("q-gqa", "shared", "gemm"),
    ("gqa", "separate", "gemm"),
    ("q-gqa", "shared", "gqa"),
    ("gqa", "separate", "gqa"),
]


def opened(variant: str, layout: str, attention: str, **changes: int) -> OnnxRunner:
    artifact, directory = onnx_bundle(variant, layout, attention)
    capacity = changes.pop("capacity", artifact.cache.capacity)
    threads = changes.pop("threads", 1)
    return load(
        dataclasses.replace(artifact, **changes), directory, threads=threads, capacity=capacity
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_chunked_prefill_after_reset(case: tuple[str, str, str], threads: int) -> None:
    """A prompt of 27 in chunks of 5, twice over, then decode up to the last token of capacity."""
    runner = opened(*case, threads=threads, prefill_chunk=5, capacity=40)
    for _ in range(2):
        assert_parity(runner, decoder_of(case[0]), prompt=27, steps=13, atol=2e-4)
    assert_parity(runner, decoder_of(case[0]), prompt=1, steps=8, atol=2e-4)
    assert_closes(runner)


def test_prefill_takes_fewer_tokens_at_depth() -> None:
    """16 heads: one copy of the scores stays at 16 MiB, until the chunk is at its least."""
    artifact, _ = onnx_bundle("q-gqa", "shared", "gemm")
    wide = spec(num_attention_heads=16, head_dim=16)
    artifact = dataclasses.replace(artifact, model=wide, prefill_chunk=128)
    assert [chunk_tokens(artifact, past) for past in (0, 1920, 8064, 10**6)] == [128, 128, 32, 16]


def test_prefill_in_the_least_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_bench.runners.run_onnx.SCORE_BYTES", 1)
    runner = opened("q-gqa", "shared", "gemm")
    assert_parity(runner, decoder_of("q-gqa"), prompt=40, steps=2, atol=2e-4)
    runner.close()


def cached_rows(variant: str, ids: np.ndarray) -> list[np.ndarray]:
    """Keys [G, S, D] of every layer as the eager model computes them."""
    decoder, rows = decoder_of(variant), []
    reference = decoder.eager_attend(len(ids))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows.append(k[0].transpose(0, 1).numpy())
        return reference(layer, q, k, v)

    decoder.hidden(torch.from_numpy(ids)[None], torch.arange(len(ids)), attend)
    return rows


def cache_bytes(runner: OnnxRunner) -> np.ndarray:
    assert runner._memory is not None
    return runner._memory.array


@pytest.mark.parametrize("case", CASES)
def test_a_step_writes_its_rows_and_nothing_else(case: tuple[str, str, str]) -> None:
    runner = opened(*case, capacity=32)
    cache, ids = runner.artifact.cache, random_ids(decoder_of(case[0]), 12)
    regions = runner.cache_regions()
    runner.prefill(ids[:9])
    for n, token in enumerate(ids[9:], start=9):
        before = cache_bytes(runner).copy()
        runner.decode(int(token))
        changed = np.flatnonzero(before != cache_bytes(runner))
        dim, size = cache.head_dim, cache.itemsize
        row = dim * size
        starts = [
            tensor * runner._memory.stride + (g * 32 + n) * row  # type: ignore[union-attr]
            for tensor in range(len(cache.names()))
            for g in range(cache.num_key_value_heads)
        ]
        allowed = np.concatenate([np.arange(s, s + row) for s in starts])
        assert changed.size
        assert np.isin(changed, allowed).all()
    assert runner.cache_regions() == regions
    for layer, expected in enumerate(cached_rows(case[0], ids)):
        first = layer * cache.tensors_per_layer * runner._memory.stride  # type: ignore[union-attr]
        segment = cache_bytes(runner)[first:].view(np.float32)
        held = segment[: expected.shape[0] * 32 * cache.head_dim].reshape(-1, 32, cache.head_dim)
        np.testing.assert_allclose(held[:, : len(ids)], expected, atol=1e-5)
    runner.close()


@pytest.mark.parametrize("attention", ["gemm", "gqa"])
def test_resident_memory_follows_the_context(attention: str, tmp_path: Path) -> None:
    """Reserved in full, paid by the token, given back by reset."""
    model = spec(
        num_hidden_layers=2,
        num_key_value_heads=1,
        qkv_sharing="k=v",
        head_dim=64,
        max_position_embeddings=2048,
    )
    decoder = random_decoder(model)
    artifact, directory = make_bundle("onnx", decoder, tmp_path / "b", onnx_attention=attention)
    runner = open_runner(directory)
    (region,) = regions = runner.cache_regions()  # type: ignore[misc]
    assert region[1] == artifact.cache.nbytes == 2 * 2048 * 64 * 4
    assert resident_bytes(regions) == 0
    ids, held, page = random_ids(decoder, 1024), 0, 4096
    for length in (16, 256, 752):
        runner.prefill(ids[held : held + length])
        held += length
        exact = held * artifact.cache.bytes_per_token
        assert exact <= resident_bytes(regions) <= exact + 2 * page  # type: ignore[operator]
    runner.reset()
    assert resident_bytes(regions) == 0
    runner.close()


def test_refusals_leave_the_sequence_as_it_was() -> None:
    runner = opened("q-gqa", "shared", "gemm", capacity=8)
    runner.prefill(np.arange(6))
    expected = runner.decode(3)
    refused = [
        (lambda: runner.prefill(np.array([], np.int64)), "no tokens"),
        (lambda: runner.prefill(np.array([1, 101])), "token id 101 is outside the vocabulary"),
        (lambda: runner.decode(-1), "token id -1 is outside"),
        (lambda: runner.prefill(np.array([1, 2])), r"context overflow: 7 tokens held \+ 2 new"),
        (lambda: runner.prefill(np.array([0.5])), "must be integers"),
    ]
    for call, message in refused:
        with pytest.raises(RunError, match=message):
            call()
        assert runner.position == 7
    runner.reset()
    runner.prefill(np.arange(6))
    np.testing.assert_array_equal(runner.decode(3), expected)
    runner.decode(1)
    with pytest.raises(RunError, match="context overflow"):
        runner.decode(1)
    runner.close()


def test_logits_returned_are_the_callers_own() -> None:
    runner = opened("q-gqa", "shared", "gqa")
    first = runner.prefill(np.arange(6))
    kept = first.copy()
    runner.decode(1)
    np.testing.assert_array_equal(first, kept)
    assert first.shape == (runner.artifact.model.vocab_size,)
    runner.close()


def test_unknown_formulation_is_refused() -> None:
    artifact, directory = onnx_bundle("q-gqa", "shared", "gemm")
    strange = dataclasses.replace(artifact, formulation="paged")
    with pytest.raises(UnsupportedError, match="formulation 'paged' is unknown"):
        load(strange, directory, threads=1, capacity=8)
