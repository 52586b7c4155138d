"""``--io optimum``: a bundle that ORTModelForCausalLM loads, and our own runner too."""

import json

import pytest
import torch

from device_bench.runners.onnx_optimum_io import OptimumIoRunner
from edgeqkv.cache import cache_spec
from edgeqkv.errors import UnsupportedError
from edgeqkv.model_dir import save_model_dir
from edgeqkv.quant import uniform
from edgeqkv.runner import open_runner
from edgeqkv.tokenizer import byte_tokenizer
from export.backends import onnx_optimum, to_onnx
from export.backends.read_onnx import read
from export.lowering import Request
from tests import variants
from tests.bundles import make_bundle
from tests.parity import assert_closes, assert_parity

OPTIONS = {"layout": "separate", "onnx_io": "optimum"}


@pytest.mark.parametrize("name", ["q-gqa", "untied-tanh", "identity"])
def test_bundle(tmp_path, name):
    """Interface, configs, what it holds, what it computes."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    decoder = variants.random_decoder(variants.CAUSAL[name])
    artifact, bundle = make_bundle("onnx", decoder, tmp_path / "bundle", **OPTIONS)
    assert artifact.formulation == "optimum"
    runner = open_runner(bundle)
    assert isinstance(runner, OptimumIoRunner)
    assert_parity(runner, decoder)
    held = sum(nbytes for _, nbytes in runner.cache_regions())
    assert held == artifact.cache.bytes_per_token * runner.position
    assert_closes(runner)
    facts = read(artifact, bundle)
    assert facts.bytes_per_token == artifact.cache.bytes_per_token
    assert [t.name for t in facts.cache_tensors] == [
        f"past_key_values.{i}.{role}" for i in range(2) for role in ("key", "value")
    ]
    assert facts.duplicate_weight_bytes == 0
    import onnx

    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    axes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.output)
    }
    groups = decoder.spec.num_key_value_heads
    for i in range(2):
        for role in ("key", "value"):
            past, present = f"past_key_values.{i}.{role}", f"present.{i}.{role}"
            assert axes.pop(past) == ["batch_size", groups, "past_sequence_length", 16]
            batch, heads, rows, dim = axes.pop(present)
            assert (batch, heads, dim) == ("batch_size", groups, 16)
            assert set(rows.split(" + ")) == {"past_sequence_length", "sequence_length"}
    assert axes == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        "position_ids": ["batch_size", "sequence_length"],
        "logits": ["batch_size", "sequence_length", 101],
    }


def test_configs_give_the_shape_of_the_cache(tmp_path):
    for name, model_type in (("qkv", "gpt2"), ("q-mqa", "gemma"), ("q-gqa", "gemma")):
        spec = variants.CAUSAL[name]
        onnx_optimum.write_configs(tmp_path, spec)
        config = json.loads((tmp_path / "config.json").read_text())
        heads = {"gpt2": "n_head", "gemma": "num_key_value_heads"}[model_type]
        assert (config["model_type"], config[heads]) == (model_type, spec.num_key_value_heads)
        spare = json.loads((tmp_path / "generation_config.json").read_text())["suppress_tokens"]
        assert spare == [97, 98, 99, 100]


@pytest.mark.parametrize(
    ("layout", "dtype", "weights", "words"),
    [
        ("auto", "fp32", "fp32", "add --cache-layout separate"),
        ("separate", "fp16", "fp32", "allowed: --cache-dtype fp32"),
        ("separate", "fp32", "int8", "int8"),
    ],
)
def test_refused(layout, dtype, weights, words):
    spec = variants.CAUSAL["q-mqa"]
    cache = cache_spec(spec, layout=layout, dtype=dtype)
    with pytest.raises(UnsupportedError, match=words):
        to_onnx.check(Request(spec, cache, uniform(weights, None), {"onnx_io": "optimum"}))
    with pytest.raises(UnsupportedError, match="onnx_io is 'tflite'; allowed: edgeqkv, optimum"):
        to_onnx.check(Request(spec, cache_spec(spec), options={"onnx_io": "tflite"}))


def greedy(decoder, ids, steps):
    for _ in range(steps):
        best = decoder(ids[None])[0, -1, : decoder.spec.used_tokens].argmax()
        ids = torch.cat([ids, best[None]])
    return ids


@pytest.mark.parametrize("name", ["q-mqa", "qkv"])
def test_optimum_generates_the_same_tokens(tmp_path, cli, name):
    """From the command's bundle, for prompts of two lengths at once."""
    pytest.importorskip("onnxscript")
    optimum = pytest.importorskip("optimum.onnxruntime")
    transformers = pytest.importorskip("transformers")
    spec = variants.spec(
        vocab_size=260,
        num_used_tokens=256,
        qkv_sharing=variants.CAUSAL[name].qkv_sharing,
        num_key_value_heads=variants.CAUSAL[name].num_key_value_heads,
    )
    decoder = variants.random_decoder(spec)
    tokenizer = byte_tokenizer().to_str()
    save_model_dir(tmp_path / "model", spec, decoder.state_dict(), {}, tokenizer_json=tokenizer)
    flags = ("-b", "onnx", "--cache-layout", "separate", "--io", "optimum")
    cli("export", "model", *flags, "-o", "out", check=0)
    model = optimum.ORTModelForCausalLM.from_pretrained(tmp_path / "out" / "onnx")
    codec = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "onnx")
    rows = [torch.tensor(codec(text)["input_ids"]) for text in ("one", "the other")]
    assert rows[0].tolist() == list(b"one")
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 9 - len(row) :], mask[i, 9 - len(row) :] = row, 1
    got = model.generate(ids, attention_mask=mask, max_new_tokens=15, do_sample=False)
    for i, row in enumerate(rows):
        assert got[i, 9:].tolist() == greedy(decoder, row, 15)[len(row) :].tolist()
