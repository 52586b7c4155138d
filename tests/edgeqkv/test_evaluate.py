"""Perplexity against torch and hand-computed values; the eval command on models and bundles."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edgeqkv.commands.eval import evaluate_bundle, run
from edgeqkv.eager import cached_attend, eager_rows, logits
from edgeqkv.errors import EdgeQKVError
from edgeqkv.evaluate import (
    BLOCK,
    log_softmax,
    mean_and_stderr,
    perplexity,
    relative_change,
    score,
    windows,
)
from edgeqkv.model_dir import save_model_dir
from edgeqkv.runner import open_runner
from edgeqkv.tokenizer import byte_tokenizer
from tests.bundles import make_bundle
from tests.variants import NON_CAUSAL, random_decoder, spec

BYTES = spec(vocab_size=320, num_used_tokens=256, qkv_sharing="k=v", num_key_value_heads=1)
TEXT = "In the beginning God created the heaven and the earth. " * 4


def write_model(folder, model=BYTES, seed=0):
    decoder = random_decoder(model, seed)
    tokenizer = byte_tokenizer().to_str()
    save_model_dir(
        folder, model, decoder.state_dict(), {"source": "test"}, tokenizer_json=tokenizer
    )
    return decoder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(MODEL_DIR, its ONNX bundle)"""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    folder = tmp_path_factory.mktemp("exported")
    make_bundle("onnx", write_model(folder / "model"), folder / "bundle")
    return folder / "model", folder / "bundle"


def test_the_loss_is_that_of_torch_over_the_used_tokens_in_the_same_windows():
    decoder = random_decoder(BYTES)
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int64)
    got = score(windows(ids, 64), eager_rows(decoder), 256)
    want = []
    for start in range(0, len(ids) - 1, 64):
        window = torch.from_numpy(ids[start : start + 65])
        with torch.no_grad():
            out = decoder(window[None, :-1])[0, :, :256]
        want.append(F.cross_entropy(out, window[1:], reduction="none"))
    np.testing.assert_allclose(got.loss, torch.cat(want).double().numpy(), atol=2e-5)
    assert perplexity(got.loss)[0] == pytest.approx(math.exp(got.loss.mean()))


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    def uniform(ids):
        for _ in ids:
            yield np.zeros(300, np.float32)

    scores = score(windows(np.arange(200), 50), uniform, 200)
    assert perplexity(scores.loss) == (pytest.approx(200), pytest.approx(0, abs=1e-9))


def test_windows_cover_every_token_once_and_stop_where_asked():
    text = windows(np.arange(11), 4)
    assert [(w.start, w.stop) for w in text] == [(0, 4), (4, 8), (8, 10)]
    assert (text.targets - text.inputs == 1).all()
    assert len(windows(np.arange(11), 4, tokens=3).inputs) == 3
    assert len(windows(np.arange(11), 4, tokens=300).inputs) == 10


def test_distance_from_a_reference_by_hand():
    ours, theirs = (
        np.log(np.array([p], np.float32)) for p in ([0.25, 0.5, 0.25], [0.5, 0.25, 0.25])
    )
    text = windows(np.array([0, 1]), 4)
    scores = score(text, lambda ids: iter(ours), 3, reference=lambda ids: iter(theirs))
    assert scores.loss[0] == pytest.approx(math.log(2))
    assert scores.reference_loss[0] == pytest.approx(math.log(4))
    assert scores.kl[0] == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert not scores.same[0]


def test_standard_errors_shrink_as_blocks_grow_in_number_and_pairing_removes_the_text():
    rng = np.random.default_rng(0)
    hard = np.repeat(rng.normal(4, 1, 400), BLOCK)  # whole blocks are easy or hard
    stderr = mean_and_stderr(hard)[1]
    assert stderr == pytest.approx(1 / math.sqrt(400), rel=0.15)
    assert mean_and_stderr(hard[:BLOCK])[1] is None
    change, change_stderr = relative_change(hard + 0.01 + rng.normal(0, 0.01, hard.shape), hard)
    assert change == pytest.approx(math.expm1(0.01), abs=3 * change_stderr)
    assert change_stderr < stderr / 100


def test_log_softmax_survives_large_logits():
    row = np.array([1e4, -1e4, 1e4 - 1], np.float32)
    np.testing.assert_allclose(np.exp(log_softmax(row)).sum(), 1)


def test_a_bundle_s_two_paths_agree_with_each_other_and_with_the_model(tmp_path, text, cli, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    decoder = write_model(tmp_path / "model")
    make_bundle("onnx", decoder, tmp_path / "bundle")
    byte = ["--tokenizer", "byte", "--text", text]
    arguments = ["eval", "bundle", "--reference", "model", "--tokens", 130, *byte]
    bundle = json.loads(cli(*arguments, "--json", check=0).stdout)
    run(tmp_path / "model", text=text, tokens=130)
    table = capsys.readouterr().out
    assert bundle["tokens"] == 130
    assert bundle["perplexity"] == pytest.approx(bundle["reference"]["perplexity"], rel=1e-4)
    assert f"{bundle['reference']['perplexity']:.4f}" in table
    assert bundle["reference"]["top1"] == 1
    assert bundle["reference"]["kl_max"] < 1e-5
    assert abs(bundle["reference"]["perplexity_change"]) < 1e-4
    assert bundle["prefill"]["agrees"]
    assert bundle["prefill"]["max_difference_nats"] < 1e-4


def test_a_prefill_that_forgets_is_noticed(exported, text):
    folder = exported[1]
    runner = open_runner(folder)
    real = runner.prefill
    runner.prefill = lambda ids: real(ids[-5:])
    data = evaluate_bundle(runner, folder, text, 100, None, "byte")
    runner.close()
    assert not data["prefill"]["agrees"]


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("gone", {}, "gone does not exist"),
        ("model", {"text": Path("gone.txt")}, "gone.txt does not exist"),
        ("model", {"text": Path("one.txt")}, "has 1 tokens"),
        ("model", {"reference": Path("small")}, "--reference small has 97 tokens"),
        ("bare", {}, "has no tokenizer.json"),
        ("small", {"tokenizer": "byte"}, "give the tokenizer that the model was trained"),
        ("plus", {"tokenizer": "byte"}, "not causal"),
    ],
)
def test_wrong_requests_are_one_line(tmp_path, text, monkeypatch, source, options, words):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "one.txt").write_text("x")
    for name, model in (("small", spec()), ("plus", NON_CAUSAL["(q=k-v)+"]), ("bare", BYTES)):
        write_model(tmp_path / name, model)
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with pytest.raises(EdgeQKVError, match=words) as error:
        run(Path(source), **{"text": text, **options})
    assert "\n" not in str(error.value)


def test_another_tokenizer_than_the_source_s_is_warned_of(tmp_path, text, capsys):
    write_model(tmp_path / "model")
    run(tmp_path / "model", text=text, tokens=4, tokenizer="byte")
    assert "warning" not in capsys.readouterr().err
    other = byte_tokenizer()
    other.add_tokens(["the earth"])
    for content in (other.to_str(), "{"):
        (tmp_path / "model" / "tokenizer.json").write_text(content)
        run(tmp_path / "model", text=text, tokens=4, tokenizer="byte")
        said = capsys.readouterr().err
        assert "model has its own tokenizer.json, --tokenizer byte is another" in said


def test_eager_logits_with_a_float32_cache_are_the_model_s():
    decoder = random_decoder(BYTES)
    ids = torch.arange(40)[None] * 7 % 256
    with torch.no_grad():
        got = logits(decoder, ids, cached_attend(BYTES, 40, "fp32"))
        torch.testing.assert_close(got, decoder(ids))
