"""edgeqkv.load and ``edgeqkv import``: a checkpoint and the MODEL_DIR made from it are one model."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import edgeqkv
from edgeqkv.commands.import_ import run
from edgeqkv.errors import CheckpointError, EdgeQKVError
from edgeqkv.tokenizer import load_tokenizer
from tests import upstream

FUSED = {
    "three-projections QKV": lambda: upstream.three_projections("QKV")[0],
    "wqkv identity": lambda: upstream.wqkv("identity", tied=False)[0],
    "nanoGPT": lambda: upstream.nanogpt(bias=True, prefix="_orig_mod.")[0],
}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save(upstream.three_projections("Q-MQA", prefix="module.")[0], path)
    return path


def imports(source, output, tokenizer=None, *, overwrite=False, as_json=False):
    """The command itself, in this process: starting torch anew costs seconds."""
    run(str(source), output, None if tokenizer is None else str(tokenizer), overwrite, as_json)


def same_logits(a, b):
    ids = torch.arange(20)[None] % upstream.VOCAB
    return torch.equal(edgeqkv.load(a)(ids), edgeqkv.load(b)(ids))


@pytest.mark.parametrize("name", FUSED)
def test_import_then_load(tmp_path, name):
    path = tmp_path / "ckpt.pt"
    torch.save(FUSED[name](), path)
    imports(path, tmp_path / "model")
    assert same_logits(path, tmp_path / "model")
    spec = edgeqkv.load(tmp_path / "model").spec
    shapes = {k: tuple(v.shape) for k, v in load_file(tmp_path / "model/model.safetensors").items()}
    assert shapes == spec.parameter_shapes()


def test_what_import_prints_and_records(tmp_path, cli, source):
    result = cli("import", source, "-o", tmp_path / "model", check=0)
    assert "format    three-projections (arXiv 2606.04032)" in result.stdout
    assert "variant   Q-MQA, " in result.stdout
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    provenance = config["provenance"]
    assert provenance["source"] == str(source)
    assert len(provenance["inferences"]) == 2
    for inference in provenance["inferences"]:
        assert f"inferred  {inference}" in result.stdout
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}


def small_tokenizer(folder, tokens):
    text = json.loads(load_tokenizer("byte").to_str())
    vocab = text["model"]["vocab"]
    text["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda kv: kv[1])[:tokens])
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(text))
    return folder


def test_a_tokenizer_says_which_ids_are_real(tmp_path, capsys, source):
    folder = small_tokenizer(tmp_path / "tok", 50)
    output = tmp_path / "model"
    imports(source, output, folder, as_json=True)
    printed = capsys.readouterr().out
    assert json.loads(printed)["spec"]["num_used_tokens"] == 50
    assert edgeqkv.load(output).spec.used_tokens == 50
    assert load_tokenizer(output).get_vocab_size() == 50
    assert "num_used_tokens 50: the size of the tokenizer" in printed


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, source):
    with pytest.raises(CheckpointError, match="has 256 tokens, the model has embeddings for 61"):
        imports(source, tmp_path / "model", "byte")
    assert not (tmp_path / "model").exists()


def test_existing_output_is_kept_unless_told(tmp_path, source):
    output = tmp_path / "model"
    imports(source, output)
    (output / "mine.txt").write_text("x")
    with pytest.raises(EdgeQKVError, match=r"exists; .* --overwrite"):
        imports(source, output)
    assert (output / "mine.txt").exists()
    imports(source, output, overwrite=True)
    assert not (output / "mine.txt").exists()


def test_a_refused_checkpoint_leaves_nothing(tmp_path, cli, source):
    source.write_bytes(source.read_bytes()[:-50])
    before = set(tmp_path.iterdir())
    result = cli("import", source, "-o", tmp_path / "model", check=1)
    assert result.stderr.startswith(f"error: {source} is damaged or cut short")
    assert result.stderr.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


def test_a_head_stored_in_the_embedding_though_untied(tmp_path):
    """One storage under two names, flagged untied: safetensors takes two tensors only."""
    checkpoint = upstream.wqkv("original")[0]
    checkpoint["model_args"]["tie_weights"] = False
    path = tmp_path / "ckpt.pt"
    torch.save(checkpoint, path)
    imports(path, tmp_path / "model")
    assert not edgeqkv.load(tmp_path / "model").spec.tie_word_embeddings
    assert same_logits(path, tmp_path / "model")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "config.json").unlink(), r"has no config\.json"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "model_type is 'list'"),
        (lambda d: (d / "config.json").write_text('{"model_type": "llama"}'), "edgeqkv import"),
        (lambda d: edit(d, rope_theta=1), "unknown key 'rope_theta'"),
        (lambda d: edit(d, provenance=[1]), r"config\.json"),
        (lambda d: edit(d, hidden_size=64), "expected"),
        (lambda d: (d / "model.safetensors").unlink(), r"has no model\.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 64), "damaged or cut short"),
        (lambda d: cut(d / "model.safetensors"), "damaged or cut short"),
    ],
)
def test_a_damaged_model_dir_is_one_line(tmp_path, model_dir, damage, words):
    damage(model_dir)
    with pytest.raises(CheckpointError, match=words) as e:
        edgeqkv.load(model_dir)
    assert "\n" not in str(e.value)


@pytest.fixture
def model_dir(tmp_path, source):
    from edgeqkv.importers import read_checkpoint
    from edgeqkv.model_dir import save_model_dir

    imported = read_checkpoint(str(source))
    save_model_dir(tmp_path / "model", imported.spec, imported.state, {})
    return tmp_path / "model"


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def test_importing_edgeqkv_needs_no_torch():
    code = "import sys, edgeqkv; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
