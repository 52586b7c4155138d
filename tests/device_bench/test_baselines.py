"""The same weights in other tools: the conversion, the files, and the tools themselves."""

import json
import sys

import numpy as np
import pytest
import torch

from device_bench.baselines import NEEDS, genai_, gguf_, gpt2, optimum_, resolve, write_baseline
from edgeqkv.artifact import read_artifact
from edgeqkv.errors import (
    BundleError,
    CheckpointError,
    MissingDependencyError,
    UnsupportedError,
    UsageError,
)
from edgeqkv.importers import read_checkpoint
from edgeqkv.model_dir import build, save_model_dir
from edgeqkv.quant import uniform
from tests import hf_gpt2, variants
from tests.parity import assert_parity, random_ids

Q_MQA = {"qkv_sharing": "k=v", "num_key_value_heads": 1}
POSSIBLE = sorted(set(variants.CAUSAL) - {"residual-gelu"})


@pytest.fixture
def model_dir(tmp_path):
    """Write a variant's MODEL_DIR; gives (folder, decoder)."""

    def write(name, **changes):
        spec = variants.VARIANTS.get(name) or variants.spec(**changes)
        decoder = variants.random_decoder(spec)
        save_model_dir(tmp_path / name, spec, decoder.state_dict(), {})
        return tmp_path / name, decoder

    return write


def as_decoder(spec, tensors):
    return build(spec, {name: torch.from_numpy(np.array(t)) for name, t in tensors.items()})


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("name", POSSIBLE)
def test_three_projections_compute_the_same(model_dir, name, grouped):
    folder, decoder = model_dir(name)
    spec, tensors = gpt2.as_qkv(*gpt2.read_model_dir(folder), grouped=grouped)
    groups = decoder.spec.num_key_value_heads if grouped else 4
    assert (spec.qkv_sharing, spec.num_key_value_heads, spec.attention_scale) == (
        "none",
        groups,
        0.25,
    )
    ids = torch.from_numpy(random_ids(decoder, 20))[None]
    torch.testing.assert_close(as_decoder(spec, tensors)(ids), decoder(ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["q-mqa", "identity-k=v", "untied-tanh", "identity"])
def test_hugging_face_folder(model_dir, tmp_path, name):
    """By a second writing of GPT-2's formulas, and back through the importer."""
    folder, decoder = model_dir(name)
    spec, tensors = gpt2.as_qkv(*gpt2.read_model_dir(folder), grouped=False)
    gpt2.write_hf_gpt2(tmp_path / "gpt2", spec, tensors)
    ids = torch.from_numpy(random_ids(decoder, 20))[None]
    found = read_checkpoint(str(tmp_path / "gpt2"))
    got = build(found.spec, found.state)(ids)
    torch.testing.assert_close(got, decoder(ids), atol=1e-4, rtol=0)
    from safetensors.torch import load_file

    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    got = hf_gpt2.logits(config, load_file(tmp_path / "gpt2" / "model.safetensors"), ids)
    torch.testing.assert_close(got, decoder(ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("residual-gelu", {}, "query is not linear"),
        ("(q=k-v)+", {}, "not causal"),
        ("narrow", {"head_dim": 8}, "32 wide in all"),
    ],
)
def test_what_gpt2_cannot_be(model_dir, tmp_path, name, changes, words):
    folder, _ = model_dir(name, **changes)
    with pytest.raises(UnsupportedError, match=words):
        write_baseline("optimum", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refusals(model_dir, tmp_path):
    folder, _ = model_dir("q-mqa")
    with pytest.raises(UsageError, match="allowed: optimum, genai, gguf, gguf:q8_0"):
        write_baseline("tflite", folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="not a MODEL_DIR"):
        write_baseline("gguf", tmp_path, tmp_path / "out")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        write_baseline("gguf", folder, tmp_path / "out")


def test_bfloat16_weights_are_refused(tmp_path):
    """Even where ml_dtypes, which onnx brings, teaches numpy the name."""
    pytest.importorskip("ml_dtypes")
    spec = variants.CAUSAL["q-mqa"]
    state = variants.random_decoder(spec).to(torch.bfloat16).state_dict()
    save_model_dir(tmp_path / "bf16", spec, state, {})
    with pytest.raises(CheckpointError, match="holds BF16 tensors"):
        gpt2.read_model_dir(tmp_path / "bf16")


@pytest.mark.parametrize("tool", ["optimum", "gguf"])
def test_a_missing_tool_is_named(model_dir, tmp_path, monkeypatch, tool):
    for module in ("optimum", "optimum.exporters.onnx", "gguf"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'edgeqkv\[{tool}\]'"):
        write_baseline(tool, model_dir("q-mqa")[0], tmp_path / "out")


# GGUF


def test_gguf_holds_the_converted_weights(model_dir, tmp_path):
    """Every tensor and every key that llama.cpp's gpt2 reads."""
    gguf = pytest.importorskip("gguf")
    folder, decoder = model_dir("q-gqa")
    artifact = write_baseline("gguf", folder, tmp_path / "out")
    assert artifact == read_artifact(tmp_path / "out")
    assert (artifact.model.label, artifact.details["baseline_of"]) == ("GQA-2", "Q-GQA-2")
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert values["general.architecture"] == "gpt2"
    expected = {
        "vocab_size": 101,
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    assert {k: values[f"gpt2.{k}"] for k in expected} == expected
    assert values["gpt2.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    found = {t.name: np.array(t.data) for t in reader.tensors}
    assert all(t.tensor_type == gguf.GGMLQuantizationType.F32 for t in reader.tensors)
    ours = {
        theirs: decoder.get_parameter(name)
        for name, theirs in gguf_._TOP.items()
        if "lm" not in name
    }
    for i in range(2):
        layer = decoder.h[i]
        k = [layer.attn.k_proj.weight, layer.attn.k_proj.bias]
        q = [layer.attn.q_proj.weight, layer.attn.q_proj.bias]
        for kind, key, query in zip(("weight", "bias"), k, q, strict=True):
            ours[f"blk.{i}.attn_qkv.{kind}"] = torch.cat([query, key, key])
            ours[f"blk.{i}.attn_output.{kind}"] = layer.attn.o_proj.get_parameter(kind)
            ours[f"blk.{i}.attn_norm.{kind}"] = layer.ln_1.get_parameter(kind)
            ours[f"blk.{i}.ffn_norm.{kind}"] = layer.ln_2.get_parameter(kind)
            ours[f"blk.{i}.ffn_up.{kind}"] = layer.mlp.c_fc.get_parameter(kind)
            ours[f"blk.{i}.ffn_down.{kind}"] = layer.mlp.c_proj.get_parameter(kind)
    assert found.keys() == ours.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=name)
    assert gguf_.declared(artifact, tmp_path / "out").bytes_per_token == 2 * 2 * 2 * 16 * 2
    again = write_baseline("gguf", folder, tmp_path / "again")
    assert again.files == artifact.files


@pytest.mark.parametrize(("stored", "bits"), [("q8_0", 8), ("q4_0", 4)])
def test_gguf_of_integers_has_the_bytes_of_ours(model_dir, tmp_path, stored, bits):
    """Blocks of 32 and positions in fp16, as our recipe of as many bits; each value within a step."""
    gguf = pytest.importorskip("gguf")
    folder, decoder = model_dir("q-gqa")
    artifact = write_baseline(f"gguf:{stored}", folder, tmp_path / "out")
    assert artifact == read_artifact(tmp_path / "out")
    assert (artifact.weights, artifact.quantisation.recipe) == (
        f"int{bits}",
        uniform(f"int{bits}", 32),
    )
    tensors = gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors
    stored_bytes = sum(int(t.n_bytes) for t in tensors)
    assert stored_bytes == artifact.quantisation.recipe.weight_bytes(artifact.model)
    (up,) = [t for t in tensors if t.name == "blk.1.ffn_up.weight"]
    found = gguf.quants.dequantize(up.data, up.tensor_type)
    wanted = decoder.get_parameter("h.1.mlp.c_fc.weight").numpy()
    largest = np.abs(wanted.reshape(-1, 32)).max(1, keepdims=True)
    step = 1.01 * largest / (2 ** (bits - 1))  # 1.01: the scale is fp16
    assert (np.abs(found - wanted).reshape(-1, 32) <= step).all()
    with pytest.raises(UnsupportedError, match="in blocks of 32, found 64 and 100; use gguf"):
        write_baseline("gguf:q8_0", model_dir("odd", intermediate_size=100)[0], tmp_path / "no")


@pytest.mark.parametrize(
    ("positions", "expected"),
    [(64, [64]), (256, [256]), (1000, [256, 512, 768, 1000]), (2048, [512, 1024, 1536, 2048])],
)
def test_gguf_contexts(positions, expected):
    assert gguf_._capacities(positions) == expected


@pytest.mark.parametrize(
    ("name", "tool", "error"),
    [
        ("untied-tanh", "gguf", 0.02),  # fp16 cache, one GELU, from a table
        ("mqa", "gguf", 0.02),
        ("identity-k=v", "gguf", 0.02),
        ("mqa", "gguf:q8_0", 0.1),
        ("mqa", "gguf:q4_0", 1.0),
    ],
)
def test_llama_cpp_computes_the_same(model_dir, tmp_path, name, tool, error):
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    folder, decoder = model_dir(name)
    artifact = write_baseline(tool, folder, tmp_path / "out")
    runner = gguf_.load(artifact, tmp_path / "out", threads=1, capacity=64)
    try:
        ids = random_ids(decoder, 27)
        std = float(decoder(torch.from_numpy(ids)[None]).std())
        runner.prefill(ids[:3])  # forgotten by the reset in assert_parity
        assert_parity(runner, decoder, atol=error * std)
        assert runner.cache_regions() is None  # no bench worker: malloc puts small blocks anywhere
    finally:
        runner.close()


def test_bench_measures_llama_cpps_cache(model_dir, tmp_path, cli):
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    folder, _ = model_dir("long", max_position_embeddings=1024, num_key_value_heads=2)
    out = tmp_path / "results.jsonl"
    workload = ("-p", 0, "-n", 4, "-r", 1, "--processes", 1)
    cli("bench", folder, "--baseline-tool", "gguf", *workload, "-o", out, check=0)
    (result,) = map(json.loads, out.read_text("utf-8").splitlines())
    found = result["cache"]["bytes_per_token"]
    assert found["formula"] == found["declared"] == round(found["measured_cache"])
    assert result["cache"]["dtype"] == "fp16"


# optimum


@pytest.fixture
def optimum():
    return pytest.importorskip("optimum.onnxruntime")


@pytest.mark.parametrize("name", ["q-mqa", "identity-k=v"])
def test_optimum_computes_the_same_with_two_full_tensors(model_dir, tmp_path, optimum, name):
    folder, decoder = model_dir(name)
    artifact = write_baseline("optimum", folder, tmp_path / "out")
    assert artifact == read_artifact(tmp_path / "out")
    assert (artifact.model.label, artifact.details["baseline_of"]) == ("QKV", decoder.spec.label)
    runner = optimum_.load(artifact, tmp_path / "out", threads=1, capacity=64)
    assert_parity(runner, decoder)
    held = sum(nbytes for _, nbytes in runner.cache_regions())
    assert held == artifact.cache.bytes_per_token * runner.position
    assert artifact.cache.bytes_per_token == 2 * 2 * 4 * 16 * 4
    runner.reset()
    assert not any(nbytes for _, nbytes in runner.cache_regions())
    runner.close()
    again = write_baseline("optimum", folder, tmp_path / "again")
    assert again.files == artifact.files  # what --resume knows a bundle by


def test_genai_runs_that_export(model_dir, tmp_path, optimum):
    """No region of its cache is known, so nothing is said of it; the process tells."""
    pytest.importorskip("onnxruntime_genai")
    folder, decoder = model_dir("q-mqa")
    artifact = write_baseline("genai", folder, tmp_path / "out")
    assert (artifact.backend, artifact.details["baseline_of"]) == ("genai", "Q-MQA")
    assert "onnxruntime-genai" in artifact.tools
    runner = genai_.load(artifact, tmp_path / "out", threads=1, capacity=64)
    runner.prefill(random_ids(decoder, 5))  # forgotten by the reset in assert_parity
    assert_parity(runner, decoder)
    assert runner.cache_regions() is None
    runner.close()
    (tmp_path / "out" / "genai_config.json").write_text("{")
    with pytest.raises(BundleError, match="cannot be loaded by GenAI"):
        genai_.load(artifact, tmp_path / "out", threads=1, capacity=64)


# bench


def test_bench_flag_refusals(model_dir, tmp_path, cli):
    folder, _ = model_dir("q-mqa")
    for arguments, words in (
        ((folder,), "is a MODEL_DIR: export it first, or give --baseline-tool optimum|genai|gguf"),
        ((folder, "--baseline-tool", "tflite"), "allowed: optimum, genai, gguf"),
        ((tmp_path, "--baseline-tool", "gguf"), "needs a MODEL_DIR"),
    ):
        assert words in cli("bench", *arguments, check=2).stderr


@pytest.mark.parametrize(
    ("tool", "hidden"), [("optimum", "optimum"), ("genai", "onnxruntime_genai"), ("gguf", "gguf")]
)
def test_a_missing_tool_is_told_before_work(model_dir, monkeypatch, tool, hidden):
    for other in (m for modules in NEEDS.values() for m in modules):
        monkeypatch.setitem(sys.modules, other, sys)  # there, as far as anyone looks
    monkeypatch.setitem(sys.modules, hidden, None)
    words = rf"baseline {tool} needs {hidden}; pip install 'edgeqkv\[{tool}\]'"
    with pytest.raises(MissingDependencyError, match=words):
        resolve([model_dir("q-mqa")[0]], tool)


def test_bench_measures_the_baseline(model_dir, cli, optimum):
    """Like any bundle; the cache is the two full tensors that the formula says."""
    folder, _ = model_dir("q-mqa-long", max_position_embeddings=1024, **Q_MQA)
    flags = ("-p", "0", "-n", "4", "-r", "2", "--processes", "1", "--json")
    out = cli("bench", folder, "--baseline-tool", "optimum", *flags, check=0)
    (line,) = json.loads(out.stdout)
    assert (line["status"], len(line["samples"]["repetitions"])) == ("ok", 2)
    assert (line["model"]["label"], line["artifact"]["engine"]) == ("QKV", "optimum-onnx")
    assert line["artifact"]["details"]["baseline_of"] == "Q-MQA"
    figures = line["cache"]["bytes_per_token"]
    assert figures["formula"] == figures["declared"] == 2 * 2 * 4 * 16 * 4
    assert figures["measured_cache"] == pytest.approx(figures["formula"], rel=0.03)
    assert figures["measured_process"] > figures["formula"]
