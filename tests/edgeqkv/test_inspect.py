import json
import sys

import pytest
import torch

from edgeqkv.artifact import MANIFEST, Artifact, file_entry
from edgeqkv.cache import cache_spec
from edgeqkv.commands.inspect import run
from edgeqkv.errors import CheckpointError
from edgeqkv.importers import read_checkpoint
from edgeqkv.model_dir import save_model_dir
from tests import upstream
from tests.variants import CAUSAL


@pytest.fixture
def inspect_json(capsys):
    """The command itself, in this process: starting torch anew costs seconds."""

    def inspect(path):
        run(str(path), None, True)
        return json.loads(capsys.readouterr().out)

    return inspect


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save(upstream.three_projections("Q-GQA-2")[0], path)
    return path


@pytest.fixture
def model_dir(tmp_path, checkpoint):
    imported = read_checkpoint(str(checkpoint))
    provenance = {"source_format": "here", "inferences": ["something: because"]}
    save_model_dir(tmp_path / "model", imported.spec, imported.state, provenance)
    return tmp_path / "model"


@pytest.fixture
def no_torch(tmp_path):
    """An environment in which importing torch fails."""
    folder = tmp_path / "no_torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('torch was imported')")
    return {"PYTHONPATH": f"{folder}:{':'.join(p for p in sys.path if p)}"}


def test_the_numbers(inspect_json, checkpoint):
    data = inspect_json(checkpoint)
    assert data["kind"] == "checkpoint"
    assert data["label"] == "Q-GQA-2"
    assert data["spec"]["qkv_sharing"] == "k=v"
    shared, separate = data["cache"]["auto"], data["cache"]["separate"]
    # layers * key/value heads * head_dim * bytes
    per_token = upstream.LAYERS * 2 * upstream.DIM * 4
    assert (shared["layout"], shared["tensors_per_layer"]) == ("shared", 1)
    assert (separate["layout"], separate["tensors_per_layer"]) == ("separate", 2)
    assert shared["bytes_per_token"]["fp32"] == separate["bytes_per_token"]["fp16"] == per_token
    assert shared["bytes_per_token"]["fp16"] == per_token // 2
    assert separate["bytes_per_token"]["fp32"] == 2 * per_token
    assert shared["tokens_in_256_MiB"]["fp32"] == 256 * 2**20 // per_token
    assert shared["nbytes_at_max_context"]["fp32"] == per_token * upstream.POSITIONS
    parameters = sum(
        t.numel()
        for n, t in upstream.three_projections("Q-GQA-2")[0]["model_state_dict"].items()
        if t.dim() < 4
    )
    assert data["parameters"] == parameters


def test_a_model_dir_needs_no_torch(cli, model_dir, no_torch):
    result = cli("inspect", "model", env=no_torch, cwd=model_dir.parent, check=0)
    assert "Q-GQA-2" in result.stdout
    assert "inferred: something: because" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_no_torch_environment_is_real(cli, checkpoint, no_torch):
    result = cli("inspect", checkpoint, env=no_torch)
    assert result.returncode != 0
    assert "torch was imported" in result.stderr


def test_presets_need_no_torch_and_fit_100_columns(cli, no_torch):
    for name in ("1.2b-qkv", "124m-q=i"):
        result = cli("inspect", "--preset", name, env=no_torch, check=0)
        assert max(map(len, result.stdout.splitlines())) <= 100
    assert "124,373,760 parameters" in result.stdout


def test_preset_numbers(capsys):
    run(None, "1.2b-q-mqa", True)
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"] == 1_033_348_480
    assert data["cache"]["auto"]["bytes_per_token"]["fp16"] == 2_816
    assert data["cache"]["separate"]["bytes_per_token"]["fp16"] == 5_632


def test_a_non_causal_model_has_no_cache(inspect_json, capsys, tmp_path):
    checkpoint = upstream.three_projections("Q=K-V")[0]
    for i in range(upstream.LAYERS):
        checkpoint["model_state_dict"][f"h.{i}.attn.pos_w"] = torch.ones(10)
        checkpoint["model_state_dict"][f"h.{i}.attn.pos_b"] = torch.ones(1)
    torch.save(checkpoint, tmp_path / "plus.pt")
    data = inspect_json(tmp_path / "plus.pt")
    assert data["label"] == "(Q=K-V)+"
    assert data["cache"]["auto"]["layout"] == "none"
    assert data["cache"]["auto"]["tokens_in_256_MiB"]["fp32"] is None
    run(str(tmp_path / "plus.pt"), None, False)
    assert "cache: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--preset", "70b"], 2, "no preset '70b'; allowed: 300m-qkv"),
        (["--preset", "300m-qkv", "x.pt"], 2, "give either PATH or --preset NAME"),
        (["."], 1, "neither a MODEL_DIR (no config.json) nor a bundle (no manifest.json)"),
    ],
)
def test_errors_are_one_line(cli, arguments, status, words):
    result = cli("inspect", *arguments, check=status)
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_absent_path_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.pt does not exist"):
        run(str(tmp_path / "absent.pt"), None, False)


def test_a_bundle_needs_no_torch(cli, tmp_path, no_torch):
    model = CAUSAL["q-mqa"]
    cache = cache_spec(model, dtype="fp16", capacity=32)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "model.bin").write_bytes(b"x" * 2048)
    artifact = Artifact(
        backend="onnx",
        entry="model.bin",
        model=model,
        cache=cache,
        cache_mode="growing",
        formulation="gemm-prefix",
        weights="fp32",
        capacities=(32,),
        prefill_chunk=8,
        files={"model.bin": file_entry(bundle / "model.bin")},
        tools={},
        details={},
    )
    (bundle / MANIFEST).write_text(json.dumps(artifact.to_dict()))
    result = cli("inspect", "bundle", "--json", env=no_torch, cwd=tmp_path, check=0)
    data = json.loads(result.stdout)
    assert (data["kind"], data["label"]) == ("bundle", "Q-MQA")
    assert data["bundle"]["bytes_per_token"] == data["cache"]["auto"]["bytes_per_token"]["fp16"]
    assert data["bundle"]["nbytes"] == 2048
    result = cli("inspect", "bundle", env=no_torch, cwd=tmp_path, check=0)
    assert "bundle: onnx (gemm-prefix), weights fp32, 2.0 KiB; cache shared fp16, growing" in (
        result.stdout
    )
