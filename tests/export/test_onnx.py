"""ONNX programs against the eager reference, what their files hold, and what audit reads in them."""

from __future__ import annotations

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

from device_bench.runners.run_onnx import load  # noqa: E402
from edgeqkv.cache import CacheSpec, cache_spec  # noqa: E402
from edgeqkv.errors import BundleError, RunError, UnsupportedError  # noqa: E402
from edgeqkv.runner import open_runner  # noqa: E402
from export.backends import to_onnx  # noqa: E402
from export.backends.read_onnx import read  # noqa: E402
from export.facts import ArtifactFacts  # noqa: E402
from export.lowering import Request  # noqa: E402
from tests.onnx_bundles import decoder_of, onnx_bundle  # noqa: E402
from tests.parity import assert_parity, random_ids  # noqa: E402
from tests.variants import LAYOUTS, NON_CAUSAL, VARIANTS, spec  # noqa: E402

FORMULATIONS = ("gemm", "gqa")


@pytest.mark.parametrize("attention", FORMULATIONS)
@pytest.mark.parametrize(("variant", "layout"), LAYOUTS)
def test_parity_and_audit(variant: str, layout: str, attention: str) -> None:
    """One layer of the formulation that auto does not take: tracing is what these tests cost."""
    model = VARIANTS[variant]
    auto = to_onnx.formulation(Request(model, cache_spec(model, layout=layout)))
    layers = 2 if auto == to_onnx.ATTENTION[attention] else 1
    artifact, directory = onnx_bundle(variant, layout, attention, layers=layers)
    assert artifact.formulation == to_onnx.ATTENTION[attention]
    runner = open_runner(directory)
    assert_parity(runner, decoder_of(variant, layers), atol=2e-4)
    runner.close()
    check_facts(read(artifact, directory), artifact.cache)


def check_facts(facts: ArtifactFacts, cache: CacheSpec) -> None:
    """The file, read on its own, is what the manifest says and copies nothing."""
    assert facts.cache_copies == ()
    assert facts.duplicate_weight_bytes == 0
    assert facts.bytes_per_token == cache.bytes_per_token
    assert {t.dtype for t in facts.cache_tensors} <= {cache.dtype}
    found = [(t.layer, t.role) for t in facts.cache_tensors]
    assert found == [(i, role) for i in range(cache.num_layers) for role in cache.roles]


@pytest.mark.parametrize("attention", FORMULATIONS)
@pytest.mark.parametrize(
    ("variant", "layout"), [("q-mqa", "shared"), ("q-gqa", "shared"), ("qkv", "separate")]
)
def test_half_precision_cache(variant: str, layout: str, attention: str) -> None:
    artifact, directory = onnx_bundle(variant, layout, attention, "fp16")
    runner = open_runner(directory)
    assert_parity(runner, decoder_of(variant), atol=2e-2)
    runner.close()
    facts = read(artifact, directory)
    check_facts(facts, artifact.cache)
    full, _ = onnx_bundle(variant, layout, attention)
    assert facts.bytes_per_token * 2 == full.cache.bytes_per_token


@pytest.mark.parametrize("variant", NON_CAUSAL)
def test_non_causal_has_no_cache_and_no_decode(variant: str) -> None:
    artifact, directory = onnx_bundle(variant, "auto")
    assert (artifact.cache_mode, artifact.formulation) == ("none", "full")
    decoder = decoder_of(variant)
    runner = open_runner(directory, threads=2)
    for length in (1, 7, 64):
        ids = random_ids(decoder, length)
        expected = decoder(torch.from_numpy(ids)[None])[0, -1].numpy()
        np.testing.assert_allclose(runner.prefill(ids), expected, atol=2e-4, rtol=0)
    with pytest.raises(RunError, match="not causal"):
        runner.decode(3)
    assert runner.cache_regions() == []
    runner.close()
    assert read(artifact, directory).cache_tensors == ()


@pytest.mark.parametrize(
    ("heads", "groups", "expected"),
    [(16, 1, "gemm-prefix"), (32, 8, "gemm-prefix"), (16, 8, "gqa-aliased"), (4, 4, "gqa-aliased")],
)
def test_auto_follows_the_query_heads_per_group(heads: int, groups: int, expected: str) -> None:
    model = spec(num_attention_heads=heads, num_key_value_heads=groups)
    assert to_onnx.formulation(Request(model, cache_spec(model))) == expected
    for name, formulation in to_onnx.ATTENTION.items():
        forced = Request(model, cache_spec(model), options={"onnx_attention": name})
        assert to_onnx.formulation(forced) == formulation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"onnx_attention": "flash"}, r"onnx_attention is 'flash'; allowed: auto, gemm, gqa"),
        ({"et_attention": "plain"}, r"unknown option 'et_attention'; allowed: onnx_attention"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, str], message: str) -> None:
    model = VARIANTS["q-mqa"]
    with pytest.raises(UnsupportedError, match=message):
        to_onnx.check(Request(model, cache_spec(model), options=options))


def test_file_holds_one_embedding_and_no_path_of_the_machine() -> None:
    _, directory = onnx_bundle("q-mqa", "shared", "gemm")
    path = directory / "model.onnx"
    model = onnx.load(path)
    onnx.checker.check_model(path)
    assert model.opset_import[0].version >= 21
    assert "site-packages" not in str(model)
    assert "stack_trace" not in str(model)
    shape = tuple(VARIANTS["q-mqa"].parameter_shapes()["wte.weight"])
    same = [t.name for t in model.graph.initializer if tuple(t.dims) in (shape, shape[::-1])]
    assert len(same) == 1
    readers = {n.op_type for n in model.graph.node if same[0] in n.input}
    assert readers == {"Gather", "Gemm"}


def test_runtime_optimisation_keeps_one_embedding(tmp_path: Path) -> None:
    _, directory = onnx_bundle("q-mqa", "shared", "gemm")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(directory / "model.onnx", options, providers=["CPUExecutionProvider"])
    model = onnx.load(tmp_path / "optimised.onnx", load_external_data=False)
    shape = [VARIANTS["q-mqa"].vocab_size, VARIANTS["q-mqa"].hidden_size]
    assert sum(list(t.dims) in (shape, shape[::-1]) for t in model.graph.initializer) == 1


# Files that are not what their manifest says, made by editing the graph.

Edit = Callable[[Any], None]


def edited(variant: str, layout: str, attention: str, tmp_path: Path, edit: Edit) -> ArtifactFacts:
    artifact, source = onnx_bundle(variant, layout, attention)
    target = tmp_path / "edited"
    shutil.copytree(source, target)
    model = onnx.load(target / "model.onnx", load_external_data=False)
    edit(model.graph)
    onnx.save(model, target / "model.onnx")
    onnx.checker.check_model(target / "model.onnx")
    return read(artifact, target)


def node(graph: Any, op_type: str, index: int = 0) -> Any:
    return [n for n in graph.node if n.op_type == op_type][index]


def insert_first(graph: Any, *nodes: Any) -> None:
    for new in reversed(nodes):
        graph.node.insert(0, new)


def add_input_like(graph: Any, name: str, new_name: str) -> None:
    original = next(v for v in graph.input if v.name == name)
    copy = graph.input.add()
    copy.CopyFrom(original)
    copy.name = new_name


def test_fused_operator_reading_value_from_another_buffer(tmp_path: Path) -> None:
    def edit(graph: Any) -> None:
        add_input_like(graph, "past.cache.0.kv", "past.cache.0.kv.again")
        node(graph, "GroupQueryAttention").input[4] = "past.cache.0.kv.again"

    facts = edited("q-mqa", "shared", "gqa", tmp_path, edit)
    assert [(t.layer, t.role) for t in facts.cache_tensors] == [(0, "key"), (1, "kv"), (0, "value")]
    assert facts.bytes_per_token == 3 * 16 * 4


def test_products_reading_value_from_another_view(tmp_path: Path) -> None:
    def edit(graph: Any) -> None:
        view = "past.cache.1.kv.0"
        add_input_like(graph, view, "x")
        product = next(n for n in graph.node if n.op_type == "MatMul" and n.input[1] == view)
        product.input[1] = "x"

    facts = edited("q-mqa", "shared", "gemm", tmp_path, edit)
    assert [(t.layer, t.role) for t in facts.cache_tensors] == [(0, "kv"), (1, "key"), (1, "value")]


def test_two_tensors_of_equal_content_are_two_tensors(tmp_path: Path) -> None:
    """layout separate of a K=V model: the same rows are written twice, and both are counted."""
    artifact, directory = onnx_bundle("q-mqa", "separate", "gemm")
    facts = read(artifact, directory)
    assert [t.role for t in facts.cache_tensors] == ["key", "value"] * 2


def test_concat_of_past_and_new_rows_is_a_copy(tmp_path: Path) -> None:
    def edit(graph: Any) -> None:
        present = next(v for v in graph.output if v.name == "present.cache.0.kv.0")
        present.name = "joined"
        present.type.tensor_type.shape.dim[0].dim_param = "T + S"
        inputs = ["past.cache.0.kv.0", "present.cache.0.kv.0"]
        graph.node.append(onnx.helper.make_node("Concat", inputs, ["joined"], axis=0))

    facts = edited("q-mqa", "shared", "gemm", tmp_path, edit)
    assert any("Concat joined of past.cache.0.kv.0" in c for c in facts.cache_copies)
    assert [t.role for t in facts.cache_tensors] == ["kv", "kv"]


@pytest.mark.parametrize(
    ("op_type", "extra", "attributes"),
    [
        ("Mul", ["one"], {}),
        ("Expand", ["shape"], {}),
        ("Transpose", [], {"perm": [0, 1]}),
        ("Cast", [], {"to": 1}),
    ],
)
def test_reading_the_cache_through_a_copy(
    op_type: str, extra: list[str], attributes: dict[str, Any], tmp_path: Path
) -> None:
    def edit(graph: Any) -> None:
        view = "past.cache.0.kv.0"
        graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1), "one"))
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1]), "shape"))
        for n in graph.node:
            if n.op_type != "Shape":
                n.input[:] = ["copied" if i == view else i for i in n.input]
        insert_first(
            graph, onnx.helper.make_node(op_type, [view, *extra], ["copied"], **attributes)
        )

    facts = edited("q-mqa", "shared", "gemm", tmp_path, edit)
    assert facts.cache_copies == (f"{op_type} copied of past.cache.0.kv.0",)
    assert [(t.layer, t.role) for t in facts.cache_tensors] == [(0, "kv"), (1, "kv")]


def test_an_output_that_repeats_the_cache(tmp_path: Path) -> None:
    def edit(graph: Any) -> None:
        past = next(v for v in graph.input if v.name == "past.cache.0.kv.0")
        graph.output.add().CopyFrom(past)
        graph.output[-1].name = "again"
        graph.node.append(onnx.helper.make_node("Identity", [past.name], ["again"]))

    facts = edited("q-mqa", "shared", "gemm", tmp_path, edit)
    assert facts.cache_copies == ("output again repeats past.cache.0.kv.0",)


def test_present_left_to_the_runtime_is_a_hidden_copy(tmp_path: Path) -> None:
    def edit(graph: Any) -> None:
        kept = [v for v in graph.output if v.name != "present.cache.0.kv.value"]
        del graph.output[:]
        graph.output.extend(kept)

    (copy,) = edited("q-mqa", "shared", "gqa", tmp_path, edit).cache_copies
    assert "gives no present value" in copy


@pytest.mark.parametrize("transposed", [False, True])
def test_second_copy_of_the_embedding(transposed: bool, tmp_path: Path) -> None:
    weight = decoder_of("q-mqa").wte.weight.numpy()

    def edit(graph: Any) -> None:
        copy = weight.T.copy() if transposed else weight
        graph.initializer.append(onnx.numpy_helper.from_array(copy, "again"))
        head = node(graph, "Gemm")
        head.input[1] = "again"
        if transposed:
            del head.attribute[:]

    facts = edited("q-mqa", "shared", "gemm", tmp_path, edit)
    assert facts.duplicate_weight_bytes == weight.nbytes


def test_damaged_and_hostile_files_are_refused(tmp_path: Path) -> None:
    artifact, source = onnx_bundle("q-mqa", "shared", "gemm")
    target = tmp_path / "bundle"
    shutil.copytree(source, target)
    path = target / "model.onnx"
    whole = path.read_bytes()
    data = target / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(BundleError, match="too short"):
        read(artifact, target)
    path.write_bytes(whole.replace(b"model.onnx.data", b"../../nx.secret"))
    with pytest.raises(BundleError, match="outside the bundle"):
        read(artifact, target)
    path.write_bytes(whole[:500])
    with pytest.raises(BundleError, match="not an ONNX model"):
        read(artifact, target)
    with pytest.raises(BundleError, match="cannot be loaded by onnxruntime"):
        load(artifact, target, threads=1, capacity=8)
