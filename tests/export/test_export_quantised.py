"""The quantisation flags of ``edgeqkv export``: what they ask for, and what they refuse before work."""

import json
from pathlib import Path

import pytest

from edgeqkv.errors import EdgeQKVError
from edgeqkv.model_dir import save_model_dir
from edgeqkv.tokenizer import byte_tokenizer
from export.commands.export import run
from tests.variants import random_decoder, spec


@pytest.fixture
def model(tmp_path):
    decoder = random_decoder(spec(qkv_sharing="k=v", intermediate_size=80))
    save_model_dir(tmp_path / "m", decoder.spec, decoder.state_dict(), {"source": "test"})
    (tmp_path / "recipe.toml").write_text('[[rules]]\npattern = "wte"\nweights = "fp16"\n')
    (tmp_path / "text.txt").write_text("In the beginning " * 200)
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int4", "recipe": Path("recipe.toml")}, "leave --weights away"),
        ({"group_size": 32, "recipe": Path("recipe.toml")}, "leave --group-size away"),
        ({"weights": "int3"}, "allowed: fp32, fp16, int8, int4"),
        ({"weights": "int4", "group_size": 24}, "power of two"),
        ({"weights": "fp16", "group_size": 32}, "contradicts weights fp16"),
        ({"group_size": 32}, "contradicts weights fp32"),
        ({"weights": "int4"}, "c_proj has 80 input columns"),
        ({"recipe": Path("gone.toml")}, "does not exist"),
        ({"calibrate": Path("text.txt")}, "give --weights int4 or int8, or --cache-rotate"),
        ({"weights": "int8", "calibrate": Path("gone.txt")}, "gone.txt does not exist"),
        ({"weights": "int8", "calibrate": Path("text.txt")}, "has no tokenizer.json"),
    ],
)
def test_contradictions_are_one_line_and_nothing_is_written(
    model, monkeypatch, tmp_path, options, words
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EdgeQKVError, match=words) as error:
        run(model, out=Path("out"), backends="onnx", **options)
    assert "\n" not in str(error.value)
    assert not Path("out").exists()


def test_a_calibration_text_of_another_vocabulary_is_refused(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save(str(model / "tokenizer.json"))
    with pytest.raises(EdgeQKVError, match="has 97 tokens; give the tokenizer that the model was"):
        run(model, out=Path("out"), backends="onnx", weights="int8", calibrate=Path("text.txt"))


def test_the_plan_shows_the_weights(model, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.toml").write_text('[[rules]]\npattern = "wte"\nweights = "fp32"\n')
    run(
        model, out=Path("o"), backends="onnx", recipe=Path("plain.toml"), dry_run=True, as_json=True
    )
    assert json.loads(capsys.readouterr().out)[0]["weights"] == "fp32"


def test_a_rotated_bundle_computes_the_original_model_and_says_so(model, monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)
    run(model, out=Path("out"), backends="onnx", cache_rotate=True, as_json=True)
    from edgeqkv.artifact import read_artifact
    from edgeqkv.model_dir import load_model_dir
    from export.verify import verify_bundle

    artifact = read_artifact(tmp_path / "out/onnx")
    assert artifact.quantisation.cache_rotation == "hadamard"
    found = verify_bundle(tmp_path / "out/onnx", decoder=load_model_dir(model), original=True)
    assert found.passed, found.failure
    assert found.numerics == "fp32"


def test_a_query_that_no_weight_makes_is_refused_before_work(tmp_path):
    decoder = random_decoder(spec(query_mode="identity"))
    save_model_dir(tmp_path / "i", decoder.spec, decoder.state_dict(), {"source": "test"})
    with pytest.raises(EdgeQKVError, match="no weight can absorb"):
        run(tmp_path / "i", out=tmp_path / "out", backends="onnx", cache_rotate=True)
    assert not (tmp_path / "out").exists()
