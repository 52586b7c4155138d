"""The Core ML runner and its interpreter. The macOS branch cannot run here and is not tested."""

from __future__ import annotations

import dataclasses
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device_bench.runners.mil_interpreter import MILInterpreter
from device_bench.runners.run_coreml import CoreMLRunner, load
from edgeqkv.artifact import Artifact
from edgeqkv.errors import BundleError, RunError, UnsupportedError
from edgeqkv.model import Decoder
from tests.bundles import make_bundle
from tests.parity import assert_closes, assert_parity, random_ids
from tests.variants import CAUSAL, NON_CAUSAL, random_decoder

ct = pytest.importorskip("coremltools")
pytestmark = pytest.mark.skipif(platform.system() == "Darwin", reason="tests the interpreter")

Bundle = tuple[Decoder, Artifact, Path]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One layer, a context of two and a bit prefill chunks, nearly exact arithmetic."""
    model = dataclasses.replace(CAUSAL["q-mqa"], num_hidden_layers=1, max_position_embeddings=150)
    decoder = random_decoder(model)
    folder = tmp_path_factory.mktemp("run_coreml") / "bundle"
    return decoder, *make_bundle("coreml", decoder, folder, dtype="fp16", coreml_precision="fp32")


@pytest.fixture
def runner(bundle: Bundle) -> CoreMLRunner:
    _, artifact, directory = bundle
    return load(artifact, directory, threads=1, capacity=artifact.cache.capacity)


def test_it_says_that_it_is_interpreted(runner: CoreMLRunner) -> None:
    assert (runner.engine, runner.interpreted) == ("coreml-interpreter", True)
    assert (runner.capacity, runner.position) == (150, 0)
    assert runner.cache_regions() is None


def test_prefill_in_chunks_up_to_the_last_slot(bundle: Bundle, runner: CoreMLRunner) -> None:
    decoder, artifact, _ = bundle
    assert artifact.prefill_chunk == 64
    assert_parity(runner, decoder, prompt=141, steps=9, atol=2e-2)
    assert runner.position == runner.capacity
    with pytest.raises(RunError, match="150 tokens held \\+ 1 new exceed the context of 150"):
        runner.decode(1)
    assert_closes(runner)


def test_chunks_change_nothing(bundle: Bundle, runner: CoreMLRunner) -> None:
    ids = random_ids(bundle[0], 100)
    whole = runner.prefill(ids)
    runner.reset()
    for token in ids[:-1]:
        runner.decode(int(token))
    np.testing.assert_allclose(runner.decode(int(ids[-1])), whole, atol=1e-4, rtol=0)


def test_reset_leaves_nothing_behind(bundle: Bundle, runner: CoreMLRunner) -> None:
    ids = random_ids(bundle[0], 5, seed=3)
    fresh = runner.prefill(ids)
    runner.prefill(random_ids(bundle[0], 30, seed=4))
    # Not even NaN in rows that are masked: NaN * 0 would reach every logit.
    runner.state["cache_0_kv"] = np.full_like(runner.state["cache_0_kv"], np.nan)
    runner.reset()
    assert runner.position == 0
    np.testing.assert_array_equal(runner.prefill(ids), fresh)


def test_stale_rows_are_masked(bundle: Bundle, runner: CoreMLRunner) -> None:
    ids = random_ids(bundle[0], 5, seed=3)
    fresh = runner.prefill(ids)
    runner.reset()
    runner.state["cache_0_kv"][:, 5:] = 1000
    np.testing.assert_array_equal(runner.prefill(ids), fresh)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no tokens"),
        ([3, 101], "token id 101 is outside the vocabulary; allowed: 0 to 100"),
        ([-1], "token id -1 is outside"),
        ([1] * 151, "context overflow"),
    ],
)
def test_refused_before_the_state_changes(
    ids: list[int], message: str, runner: CoreMLRunner
) -> None:
    runner.prefill(np.array([1, 2]))
    before = runner.state["cache_0_kv"].copy()
    with pytest.raises(RunError, match=message):
        runner.prefill(np.array(ids, np.int64))
    assert runner.position == 2
    np.testing.assert_array_equal(runner.state["cache_0_kv"], before)


def test_non_causal_computes_the_whole_sequence_again(tmp_path: Path) -> None:
    model = dataclasses.replace(NON_CAUSAL["(q=k-v)+"], num_hidden_layers=1)
    decoder = random_decoder(model)
    made = make_bundle("coreml", decoder, tmp_path / "b", dtype="fp16", coreml_precision="fp32")
    run = load(*made, threads=1, capacity=64)
    ids = random_ids(decoder, 9)
    run.prefill(ids[:8])
    expected = decoder(torch.from_numpy(ids)[None])[0, -1].numpy()
    np.testing.assert_allclose(run.decode(int(ids[8])), expected, atol=1e-4, rtol=0)
    assert run.position == 9


def test_states_are_float16_and_hold_what_was_fed(bundle: Bundle, runner: CoreMLRunner) -> None:
    runner.prefill(np.array([4, 5]))
    state = runner.state["cache_0_kv"]
    assert (state.dtype, state.shape) == (np.dtype(np.float16), (1, 150, 16))
    assert np.abs(state[0, :2]).min() > 0
    assert not state[0, 2:].any()


def edit(bundle: Bundle, target: Path, change: Any) -> tuple[Artifact, Path]:
    _, artifact, directory = bundle
    shutil.copytree(directory, target)
    model = target / artifact.entry / "Data" / "com.apple.CoreML" / "model.mlmodel"
    spec = ct.utils.load_spec(str(target / artifact.entry))
    main = spec.mlProgram.functions["main"]
    change(main.block_specializations[main.opset].operations)
    model.write_bytes(spec.SerializeToString())
    return artifact, target


def test_an_operation_without_an_implementation(bundle: Bundle, tmp_path: Path) -> None:
    """silu exists in MIL and has no value_inference."""

    def change(operations: Any) -> None:
        gelu = next(op for op in operations if op.type == "gelu")
        gelu.type = "silu"
        del gelu.inputs["mode"]

    run = load(*edit(bundle, tmp_path / "b", change), threads=1, capacity=150)
    with pytest.raises(UnsupportedError, match="no implementation of silu"):
        run.decode(1)


def test_an_edited_program_computes_something_else(bundle: Bundle, tmp_path: Path) -> None:
    """The interpreter runs what is on disk: another activation shows in the logits."""

    def change(operations: Any) -> None:
        gelu = next(op for op in operations if op.type == "gelu")
        gelu.type = "relu"
        del gelu.inputs["mode"]

    decoder = bundle[0]
    run = load(*edit(bundle, tmp_path / "b", change), threads=1, capacity=150)
    with pytest.raises(AssertionError, match="Mismatched"):
        assert_parity(run, decoder, atol=2e-2)


def test_reductions_do_not_overflow_float16(tmp_path: Path) -> None:
    """Activations of a few hundred are common in trained models; their squares leave float16."""
    decoder = random_decoder(dataclasses.replace(CAUSAL["q-mqa"], num_hidden_layers=1))
    decoder.get_parameter("wte.weight").mul_(600)
    made = make_bundle("coreml", decoder, tmp_path / "b", dtype="fp16")
    logits = load(*made, threads=1, capacity=64).prefill(np.array([1, 2, 3]))
    expected = decoder(torch.tensor([[1, 2, 3]]))[0, -1].numpy()
    assert np.abs(expected).max() > 1000
    np.testing.assert_allclose(logits, expected, atol=np.abs(expected).max() * 5e-3, rtol=0)


@pytest.mark.parametrize("damage", ["model.mlmodel", "weights/weight.bin"])
def test_damaged_package(damage: str, bundle: Bundle, tmp_path: Path) -> None:
    _, artifact, directory = bundle
    shutil.copytree(directory, tmp_path / "b")
    path = tmp_path / "b" / artifact.entry / "Data" / "com.apple.CoreML" / damage
    path.write_bytes(b"damaged")
    with pytest.raises(BundleError, match="cannot be read as an mlprogram"):
        MILInterpreter(tmp_path / "b" / artifact.entry)
