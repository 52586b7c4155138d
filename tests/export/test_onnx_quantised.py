"""Quantised ONNX bundles: the recipe's own numbers in the file, the int8 cache as stored, and quality."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from device_bench.memory import resident_bytes  # noqa: E402
from device_bench.runners.run_onnx import OnnxRunner, _session  # noqa: E402
from edgeqkv.artifact import Artifact, read_artifact  # noqa: E402
from edgeqkv.cache import cache_spec  # noqa: E402
from edgeqkv.commands.eval import run as run_eval  # noqa: E402
from edgeqkv.commands.import_ import run as run_import  # noqa: E402
from edgeqkv.eager import cached_attend, logits, quantise_rows  # noqa: E402
from edgeqkv.errors import UnsupportedError  # noqa: E402
from edgeqkv.quant import QuantRecipe, Rule, uniform  # noqa: E402
from edgeqkv.runner import open_runner  # noqa: E402
from export.audit import audit_bundle, find_problems  # noqa: E402
from export.backends import onnx_weights, to_onnx  # noqa: E402
from export.backends.read_onnx import read  # noqa: E402
from export.commands.export import run as run_export  # noqa: E402
from export.lowering import Request  # noqa: E402
from export.quantise import quantise, round_to_nearest  # noqa: E402
from export.verify import verify_bundle  # noqa: E402
from tests.bundles import make_bundle  # noqa: E402
from tests.parity import assert_parity, random_ids  # noqa: E402
from tests.variants import VARIANTS, random_decoder, spec  # noqa: E402

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
MIXED = """
[[rules]]
pattern = "wpe"
weights = "fp16"
[[rules]]
pattern = "wte"
weights = "int8"
[[rules]]
pattern = "h.0.*"
weights = "fp32"
[[rules]]
pattern = "*.c_proj"
weights = "int8"
group_size = 32
[[rules]]
pattern = "h.1.attn.*"
weights = "fp16"
[[rules]]
pattern = "*"
weights = "int4"
"""


def one_layer(variant: str) -> Any:
    return random_decoder(dataclasses.replace(VARIANTS[variant], num_hidden_layers=1))


Made = tuple[Any, Artifact, Path]  # rounded decoder, manifest, folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int | None], Made]:
    """One export for every test that asks for the same; copy the folder before you change it."""
    kept: dict[Any, Made] = {}

    def make(variant: str, weights: str, group_size: int | None) -> Made:
        key = (variant, weights, group_size)
        if key not in kept:
            decoder, folder = one_layer(variant), tmp_path_factory.mktemp("b") / "b"
            bundle = make_bundle("onnx", decoder, folder, weights=weights, group_size=group_size)
            kept[key] = (decoder, *bundle)
        return kept[key]

    return make


# Weights


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_what_the_operators_read(bits: int) -> None:
    most = 2 ** (bits - 1)
    q = torch.randint(-most, most, (5, 96), dtype=torch.int8)
    packed = onnx_weights.pack(q, bits, 32).numpy()
    assert packed.shape == (5, 3, 4 * bits)
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], -1)
    np.testing.assert_array_equal(packed.reshape(5, 96).astype(int) - most, q.numpy())


@pytest.mark.parametrize(
    ("group", "block"), [(32, 32), (16, 16), (64, 64), (1024, 128), (96, 32), (48, 16), (40, 8)]
)
def test_blocks_divide_groups(group: int, block: int) -> None:
    assert onnx_weights.block_size(group) == block


@pytest.mark.parametrize(
    ("variant", "weights", "group_size"),
    [
        ("q-mqa", "int4", 32),
        ("untied-tanh", "int4", 0),
        ("q-mqa", "int8", 0),
        ("qkv", "fp16", None),
    ],
)
def test_the_file_holds_the_rounded_weights_and_nothing_else(
    variant: str, weights: str, group_size: int | None, made: Any
) -> None:
    """Computed in float, as the operator does where it is not packed: parity as of float weights."""
    decoder, artifact, directory = made(variant, weights, group_size)
    session = _session(directory / artifact.entry, 1, packed=False)
    runner = OnnxRunner(artifact, session, artifact.cache.capacity)
    assert_parity(runner, decoder, atol=5e-4)
    runner.close()
    facts = read(artifact, directory)
    assert facts.duplicate_weight_bytes == 0
    expected = artifact.quantisation.recipe.weight_bytes(decoder.spec)
    assert expected <= facts.weight_bytes < expected + 500  # shapes and other constants
    if weights != "fp16":
        packed = open_runner(directory)  # activations rounded to 8 bits
        ids = random_ids(decoder, 12)
        want = decoder(torch.from_numpy(ids)[None])[0, -1].numpy()
        assert 1e-4 < np.abs(packed.prefill(ids) - want).max() / want.std() < 0.1
        packed.close()


def test_a_tied_embedding_is_one_initializer(made: Any) -> None:
    _, _, directory = made("q-mqa", "int4", 32)
    graph = onnx.load(directory / "model.onnx", load_external_data=False).graph
    (gather,) = [n for n in graph.node if n.op_type == "GatherBlockQuantized"]
    heads = [n for n in graph.node if n.op_type == "MatMulNBits" and n.input[1] == gather.input[0]]
    assert len(heads) == 1
    sizes = [list(t.dims) for t in graph.initializer if "wte" in t.name]
    assert sorted(sizes) == [[101, 2], [101, 2, 16]]  # scale and packed


@pytest.mark.parametrize("kind", ["unrounded", "other integers"])
def test_audit_finds_the_embedding_stored_twice(kind: str, made: Any, tmp_path: Path) -> None:
    """As naive quantisation leaves it: integers for the head, another copy for the embedding."""
    original = one_layer("q-mqa").wte.weight
    _, artifact, source = made("q-mqa", "int4", 32)
    directory = Path(shutil.copytree(source, tmp_path / "b"))
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    gather = next(n for n in model.graph.node if n.op_type == "GatherBlockQuantized")
    add = model.graph.initializer.append
    if kind == "unrounded":
        add(onnx.numpy_helper.from_array(original.numpy(), "again"))
        gather.op_type, gather.domain = "Gather", ""
        del gather.attribute[:]
        gather.input[:] = ["again", gather.input[1]]
        expected = original.numel() * 4
    else:
        tensor = round_to_nearest(original * 1.01, 4, 32)
        packed = onnx_weights.pack(tensor.q, 4, 32).numpy()
        add(onnx.numpy_helper.from_array(packed, "again"))
        add(onnx.numpy_helper.from_array(tensor.scale.numpy()[..., None], "scale again"))
        gather.input[0], gather.input[2] = "again", "scale again"
        expected = packed.nbytes + tensor.scale.numel() * 2
    onnx.save(model, directory / "model.onnx")
    assert read(artifact, directory).duplicate_weight_bytes == expected


@pytest.mark.parametrize(
    ("changes", "request_changes", "words"),
    [
        ({}, {"options": {"onnx_attention": "gqa"}, "dtype": "int8"}, "one scale for all tokens"),
        ({"hidden_size": 72}, {"recipe": uniform("int8")}, "wte has 72 input columns; int8 needs"),
        (
            {},
            {"recipe": uniform("int4"), "options": {"onnx_io": "optimum"}, "layout": "separate"},
            "keeps its weights in fp32",
        ),
    ],
)
def test_refused_before_anything_is_traced(
    changes: dict[str, Any], request_changes: dict[str, Any], words: str
) -> None:
    model = spec(qkv_sharing="k=v", **changes)
    cache_changes = {k: request_changes.pop(k) for k in ("dtype", "layout") if k in request_changes}
    with pytest.raises(UnsupportedError, match=words) as error:
        to_onnx.check(Request(model, cache_spec(model, **cache_changes), **request_changes))
    assert "\n" not in str(error.value)


# The int8 cache


@pytest.fixture(scope="module", params=[("q-gqa", "shared"), ("gqa", "separate")], ids="/".join)
def int8_cache(request: Any, tmp_path_factory: Any) -> tuple[Any, Artifact, Path]:
    variant, layout = request.param
    decoder = random_decoder(VARIANTS[variant])
    folder = tmp_path_factory.mktemp("int8") / "b"
    return decoder, *make_bundle("onnx", decoder, folder, layout=layout, dtype="int8")


def test_int8_cache_computes_what_its_definition_says(int8_cache: Any) -> None:
    """In whatever portions tokens arrive: every row is read as it is stored, the newest too."""
    decoder, artifact, directory = int8_cache
    ids = random_ids(decoder, 40)
    attend = cached_attend(decoder.spec, len(ids), "int8")
    want = logits(decoder, torch.from_numpy(ids)[None], attend)[0].numpy()
    for chunk in (1, 7, 128):
        runner = open_runner(directory)
        runner.artifact = dataclasses.replace(artifact, prefill_chunk=chunk)
        got = [runner.prefill(ids[:30]), *(runner.decode(int(t)) for t in ids[30:])]
        runner.close()
        # A row may round the other way where its float differs in the last place.
        assert np.abs(np.stack(got) - want[29:]).max() < 2e-2 * want.std()
    exact = decoder(torch.from_numpy(ids)[None])[0].numpy()
    assert np.abs(want - exact).max() > 2e-3  # an int8 cache is not a float one


def test_int8_cache_holds_rows_and_scales_and_audit_counts_both(int8_cache: Any) -> None:
    decoder, artifact, directory = int8_cache
    cache = artifact.cache
    runner = open_runner(directory)
    assert isinstance(runner, OnnxRunner)
    memory = runner._memory
    assert memory is not None
    ids = random_ids(decoder, 20)
    runner.prefill(ids)
    x = decoder.h[0].ln_1(decoder.wte(torch.from_numpy(ids)) + decoder.wpe(torch.arange(20)))
    _, k, _ = decoder.h[0].attn.project(x[None])
    q, scale = quantise_rows(k[0].transpose(0, 1))
    shape = (cache.num_key_value_heads, cache.capacity)
    start = memory.scale_start - memory.start
    rows = memory.array[: q.shape[0] * cache.capacity * cache.head_dim].view(np.int8)
    scales = memory.array[start : start + 4 * shape[0] * shape[1]].view(np.float32)
    np.testing.assert_allclose(rows.reshape(*shape, -1)[:, :20], q.numpy(), atol=1)
    np.testing.assert_allclose(scales.reshape(shape)[:, :20], scale[..., 0].numpy(), rtol=1e-4)
    runner.close()
    facts = read(artifact, directory)
    assert find_problems(artifact, facts) == []
    assert facts.bytes_per_token == cache.bytes_per_token
    kinds = sorted((t.layer, t.role, t.dtype) for t in facts.cache_tensors)
    per_layer = [(role, "int8") for role in cache.roles] + [("scale", "fp32")] * len(cache.roles)
    assert kinds == sorted((i, *kind) for i in range(cache.num_layers) for kind in per_layer)


Edit = Callable[[Any], None]


def _own_scale_for_values(graph: Any) -> None:
    """A shared cache whose values have scales of their own: more bytes than the manifest says."""
    name = "past.cache.0.kv.scale.0"
    given = next(v for v in graph.input if v.name == name)
    graph.input.add().CopyFrom(given)
    graph.input[-1].name = "other"
    last = [n for n in graph.node if name in n.input and n.op_type == "Mul"][-1]
    last.input[:] = ["other" if i == name else i for i in last.input]


def _widened_for_an_output(graph: Any) -> None:
    """A float copy of a layer's rows that outlives the product."""
    cast = next(n for n in graph.node if n.op_type == "Cast" and n.input[0] == "past.cache.0.kv.0")
    graph.output.add().CopyFrom(graph.output[0])
    graph.output[-1].name = "wide"
    graph.node.append(onnx.helper.make_node("Identity", [cast.output[0]], ["wide"]))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_own_scale_for_values, "bytes per token"),
        (_widened_for_an_output, "output wide repeats past.cache.0.kv.0"),
    ],
)
def test_audit_catches_a_false_int8_cache(
    edit: Edit, words: str, int8_cache: Any, tmp_path: Path
) -> None:
    _, artifact, source = int8_cache
    if artifact.cache.layout != "shared":
        pytest.skip("one layout is enough")
    shutil.copytree(source, tmp_path / "b")
    model = onnx.load(tmp_path / "b/model.onnx", load_external_data=False)
    edit(model.graph)
    onnx.save(model, tmp_path / "b/model.onnx")
    problems = find_problems(artifact, read(artifact, tmp_path / "b"))
    assert any(words in p for p in problems), problems


def test_int8_cache_memory_is_its_formula(tmp_path: Path) -> None:
    """Rows and scales together grow by bytes_per_token, from nothing."""
    model = spec(
        num_hidden_layers=1, num_key_value_heads=1, qkv_sharing="k=v", max_position_embeddings=1024
    )
    artifact, directory = make_bundle(
        "onnx", random_decoder(model), tmp_path / "b", dtype="int8", weights="int8"
    )
    runner = open_runner(directory)
    regions = runner.cache_regions()
    assert regions is not None
    assert (held := resident_bytes(regions)) == 0
    runner.prefill(random_ids(random_decoder(model), 1024))
    held = resident_bytes(regions)
    assert held == 1024 * artifact.cache.bytes_per_token == 1024 * (16 + 4)
    runner.reset()
    assert resident_bytes(regions) == 0
    runner.close()


# Trained checkpoints, as a user would

TRAINED = [  # checkpoint, flags of export, largest perplexity change allowed
    ("q-mqa", {"weights": "int4", "cache_dtype": "int8"}, 0.03),
    ("q-gqa2", {"weights": "int8", "cache_dtype": "int8", "cache_layout": "separate"}, 0.01),
    ("qkv", {"recipe": Path("mixed.toml"), "cache_dtype": "fp16"}, 0.01),
]


@pytest.mark.parametrize(("name", "flags", "allowed"), TRAINED, ids=lambda v: str(v)[:30])
def test_trained_checkpoints_through_every_command(
    name: str,
    flags: dict[str, Any],
    allowed: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mixed.toml").write_text(MIXED)
    model, text = Path("model"), CHECKPOINTS / "held_out.txt"
    tokenizer = str(CHECKPOINTS / "tokenizer.json")
    run_import(str(CHECKPOINTS / f"kjv-{name}.pt"), output=model, tokenizer=tokenizer)
    run_export(model, out=Path("out"), backends="onnx", **flags)
    bundle = Path("out/onnx")
    capsys.readouterr()
    found = verify_bundle(bundle)
    assert found.passed, found.failure
    audit = audit_bundle(bundle)
    artifact: Artifact = read_artifact(bundle)
    assert audit.problems == ()
    assert audit.facts.duplicate_weight_bytes == 0
    assert audit.facts.bytes_per_token == artifact.cache.bytes_per_token
    floor = artifact.quantisation.recipe.weight_bytes(artifact.model)
    assert floor <= artifact.nbytes < floor + 70_000  # the graph itself
    run_eval(bundle, text, tokens=400, reference=model, as_json=True)
    quality = json.loads(capsys.readouterr().out)
    assert quality["prefill"]["agrees"]
    assert abs(quality["reference"]["perplexity_change"]) < allowed
    assert quality["reference"]["top1"] > 0.8


def test_integers_are_taken_as_they_are(tmp_path: Path) -> None:
    """Whoever chose them: other integers than the nearest, as GPTQ gives, arrive in the file."""
    decoder = one_layer("q-mqa")
    recipe = QuantRecipe((Rule("h.0.mlp.c_fc", "int4"),))
    tensors = quantise(decoder, recipe)
    tensor = tensors["h.0.mlp.c_fc"]
    tensor.q.copy_(tensor.q.flip(0))
    request = Request(decoder.spec, cache_spec(decoder.spec), recipe, {}, tensors)
    to_onnx.lower(decoder, request, tmp_path)
    graph = onnx.load(tmp_path / "model.onnx").graph
    (stored,) = [t for t in graph.initializer if t.name.endswith("c_fc.stored.packed")]
    expected = onnx_weights.pack(tensor.q, 4, 32).numpy()
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(stored), expected)
