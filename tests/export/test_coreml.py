"""Core ML lowering and audit, by the reference interpreter: no Mac here."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device_bench.runners.run_coreml import CoreMLRunner, load
from edgeqkv.artifact import Artifact
from edgeqkv.attention import Attend
from edgeqkv.cache import cache_spec
from edgeqkv.errors import BundleError, UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quant import uniform
from edgeqkv.spec import ModelSpec
from export.backends import to_coreml
from export.backends.read_coreml import read
from export.lowering import Request
from tests.bundles import make_bundle
from tests.parity import assert_parity, random_ids
from tests.variants import CAUSAL, LAYOUTS, NON_CAUSAL, random_decoder, spec

ct = pytest.importorskip("coremltools")
Bundle = tuple[Artifact, Path]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Decoder, Bundle]]:
    """(decoder, bundle) of a model, lowered once per module; nobody may write into it."""
    made: dict[Any, tuple[Decoder, Bundle]] = {}

    def get(model: ModelSpec, layout: str = "auto", **options: str) -> tuple[Decoder, Bundle]:
        key = (model, layout, tuple(options.items()))
        if key not in made:
            decoder = random_decoder(model)
            folder = tmp_path_factory.mktemp("coreml") / "bundle"
            made[key] = (
                decoder,
                make_bundle("coreml", decoder, folder, layout=layout, dtype="fp16", **options),
            )
        return made[key]

    return get


def runner(made: Bundle) -> CoreMLRunner:
    artifact, directory = made
    return load(artifact, directory, threads=1, capacity=artifact.cache.capacity)


def with_fp16_cache(decoder: Decoder) -> Decoder:
    """The same model, its keys and values rounded to float16 as the state rounds them."""
    rounded = copy.copy(decoder)

    def eager_attend(length: int) -> Attend:
        plain = Decoder.eager_attend(decoder, length)
        return lambda layer, q, k, v: plain(layer, q, k.half().float(), v.half().float())

    object.__setattr__(rounded, "eager_attend", eager_attend)
    return rounded


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_fp32_compute_differs_from_eager_by_the_fp16_state_alone(
    name: str, layout: str, bundle: Any
) -> None:
    model = dataclasses.replace(CAUSAL[name], num_hidden_layers=1)
    decoder, made = bundle(model, layout, coreml_precision="fp32")
    assert_parity(runner(made), with_fp16_cache(decoder), atol=1e-3)
    artifact, directory = made
    facts = read(artifact, directory)
    assert facts.bytes_per_token == artifact.cache.bytes_per_token
    roles = [t.role for t in facts.cache_tensors]
    assert roles == list(artifact.cache.roles)
    assert {t.dtype for t in facts.cache_tensors} == {"fp16"}


@pytest.mark.parametrize(
    ("name", "layout"), [("q-mqa", "shared"), ("q-gqa", "shared"), ("gqa", "separate")]
)
def test_fp16_compute(name: str, layout: str, bundle: Any) -> None:
    decoder, made = bundle(CAUSAL[name], layout)
    assert_parity(runner(made), decoder, atol=5e-2)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_non_causal_is_stateless_and_sees_every_token(precision: str, bundle: Any) -> None:
    model = dataclasses.replace(NON_CAUSAL["(q=k-v)+"], num_hidden_layers=1)
    decoder, made = bundle(model, coreml_precision=precision)
    artifact, directory = made
    assert (artifact.cache_mode, artifact.formulation) == ("none", "full")
    assert read(artifact, directory).cache_tensors == ()
    run = runner(made)
    for length in (1, 5, model.max_position_embeddings):
        ids = random_ids(decoder, length)
        expected = decoder(torch.from_numpy(ids)[None])[0, -1].numpy()
        run.reset()
        atol = 1e-4 if precision == "fp32" else 5e-2
        np.testing.assert_allclose(run.prefill(ids), expected, atol=atol, rtol=0)


def test_token_ids_beyond_16_bits(bundle: Any) -> None:
    """coremltools narrows indices to 16 bits where it thinks that they fit."""
    model = spec(
        vocab_size=70_000,
        num_used_tokens=None,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        qkv_sharing="k=v",
    )
    decoder, made = bundle(model)
    run, ids = runner(made), np.array([32_767, 32_768, 65_535, 65_536, 69_999])
    expected = decoder(torch.from_numpy(ids)[None])[0].numpy()
    got = np.stack([run.decode(int(token)) for token in ids])
    np.testing.assert_allclose(got, expected, atol=5e-2, rtol=0)


def test_what_is_written(bundle: Any) -> None:
    decoder, (artifact, directory) = bundle(CAUSAL["q-mqa"])
    assert artifact.entry == "model.mlpackage"
    assert (artifact.cache_mode, artifact.capacities) == ("static", (64,))
    assert artifact.prefill_chunk == 64
    assert artifact.details["compute_precision"] == artifact.stored_weights == "fp16"
    facts = read(artifact, directory)
    # Every parameter once, the tied embedding included, and little beside them.
    parameters = 2 * decoder.spec.num_parameters()
    assert parameters <= facts.weight_bytes < parameters * 1.02
    assert facts.duplicate_weight_bytes == 0
    assert facts.cache_copies == ()


def test_capacity_of_one(tmp_path: Path) -> None:
    decoder = random_decoder(dataclasses.replace(CAUSAL["q-mqa"], num_hidden_layers=1))
    made = make_bundle("coreml", decoder, tmp_path / "b", dtype="fp16", capacity=1)
    expected = decoder(torch.tensor([[7]]))[0, 0].numpy()
    np.testing.assert_allclose(runner(made).decode(7), expected, atol=5e-2, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "weights", "options", "message"),
    [
        ("fp32", "fp32", {}, "cache dtype is fp32; Core ML states are float16 only, allowed: fp16"),
        ("int8", "fp32", {}, "cache dtype is int8; Core ML states are float16 only, allowed: fp16"),
        (
            "fp16",
            "fp16",
            {"coreml_precision": "fp32"},
            "weights fp16 .* fp32 compute; allowed: fp32",
        ),
        ("fp16", "fp32", {"coreml_precision": "bf16"}, "'bf16'; allowed: fp16, fp32"),
    ],
)
def test_refused(dtype: str, weights: str, options: dict[str, str], message: str) -> None:
    model = CAUSAL["q-mqa"]
    request = Request(model, cache_spec(model, dtype=dtype), uniform(weights), options)
    with pytest.raises(UnsupportedError, match=message):
        to_coreml.check(request)


def test_weight_beyond_float16(tmp_path: Path) -> None:
    decoder = random_decoder(CAUSAL["q-mqa"])
    decoder.get_parameter("h.1.mlp.c_fc.weight")[3, 4] = -1e5
    with pytest.raises(UnsupportedError, match=r"h\.1\.mlp\.c_fc\.weight holds 1e\+05"):
        make_bundle("coreml", decoder, tmp_path, dtype="fp16")
    assert not list(tmp_path.iterdir())


# The audit, on programs edited to be what they should not be.


def edited(made: Bundle, target: Path, change: Callable[[Any, Any], None]) -> Bundle:
    """A copy of a bundle whose program went through ``change(spec, block)``."""
    artifact, directory = made
    shutil.copytree(directory, target)
    model = target / artifact.entry / "Data" / "com.apple.CoreML" / "model.mlmodel"
    proto = ct.utils.load_spec(str(target / artifact.entry))
    main = proto.mlProgram.functions["main"]
    change(proto, main.block_specializations[main.opset])
    model.write_bytes(proto.SerializeToString())
    return artifact, target


def first(block: Any, kind: str) -> Any:
    return next(op for op in block.operations if op.type == kind)


def bound(op: Any, parameter: str) -> Any:
    return op.inputs[parameter].arguments[0]


def route_through(block: Any, op: Any, parameter: str, kind: str, by: str = "x") -> None:
    """Insert an operation of ``kind`` in front of an input."""
    new = block.operations.add(type=kind)
    source = bound(op, parameter).name
    new.inputs[by].arguments.add(name=source)
    maker = next(o for o in block.operations if source in [v.name for v in o.outputs])
    new.outputs.add(name="inserted").type.CopyFrom(maker.outputs[0].type)
    bound(op, parameter).name = "inserted"


def test_two_states_under_a_shared_manifest(bundle: Any) -> None:
    _, (shared, _) = bundle(CAUSAL["q-mqa"], "shared")
    _, (_, separate) = bundle(CAUSAL["q-mqa"], "separate")
    facts = read(shared, separate)
    assert [(t.layer, t.role) for t in facts.cache_tensors] == [
        (0, "key"),
        (0, "value"),
        (1, "key"),
        (1, "value"),
    ]
    assert facts.bytes_per_token == 2 * shared.cache.bytes_per_token


def test_state_rewritten_by_concat(bundle: Any, tmp_path: Path) -> None:
    def change(_: Any, block: Any) -> None:
        route_through(block, first(block, "write_state"), "data", "concat", by="values")

    _, made = bundle(CAUSAL["q-mqa"])
    facts = read(*edited(made, tmp_path / "b", change))
    assert facts.cache_copies == ("cache_0_kv is rewritten whole by concat inserted",)


def test_state_written_twice(bundle: Any, tmp_path: Path) -> None:
    def change(_: Any, block: Any) -> None:
        block.operations.add().CopyFrom(first(block, "write_state"))

    _, made = bundle(CAUSAL["q-mqa"])
    facts = read(*edited(made, tmp_path / "b", change))
    assert facts.cache_copies == ("cache_0_kv is written 2 times per step",)


def test_state_updated_from_another_state(bundle: Any, tmp_path: Path) -> None:
    def change(_: Any, block: Any) -> None:
        bound(first(block, "slice_update"), "x").name = "read_state_1"

    _, made = bundle(CAUSAL["q-mqa"])
    (found,) = read(*edited(made, tmp_path / "b", change)).cache_copies
    assert found.startswith("cache_0_kv is rewritten whole: ")


def test_cache_repeated_for_the_query_heads(bundle: Any, tmp_path: Path) -> None:
    def change(_: Any, block: Any) -> None:
        route_through(block, first(block, "matmul"), "y", "tile")

    _, made = bundle(CAUSAL["q-mqa"])
    facts = read(*edited(made, tmp_path / "b", change))
    assert facts.cache_copies == ("cache_0_kv is copied by tile inserted",)
    assert facts.cache_tensors[0].role == "kv"


def test_fp32_compute_copies_the_cache(bundle: Any) -> None:
    model = dataclasses.replace(CAUSAL["q-mqa"], num_hidden_layers=1)
    _, made = bundle(model, "shared", coreml_precision="fp32")
    (found,) = read(*made).cache_copies
    assert found.startswith("cache_0_kv is copied to fp32 by cast")


def test_duplicate_weights(bundle: Any, tmp_path: Path) -> None:
    """The embedding stored a second time at the end of weight.bin, as an untied export would."""
    _, (artifact, directory) = bundle(CAUSAL["q-mqa"])
    weights = Path(artifact.entry, "Data", "com.apple.CoreML", "weights", "weight.bin")
    size = (directory / weights).stat().st_size

    def change(_: Any, block: Any) -> None:
        head = [op for op in block.operations if op.type == "linear"][-1]
        const = next(
            op
            for op in block.operations
            if op.outputs[0:1] and op.outputs[0].name == bound(head, "weight").name
        )
        second = block.operations.add()
        second.CopyFrom(const)
        second.outputs[0].name = bound(head, "weight").name = "second_embedding"
        second.attributes["val"].blobFileValue.offset = size

    made = edited((artifact, directory), tmp_path / "b", change)
    data = (directory / weights).read_bytes()
    spec_ = artifact.model
    nbytes = spec_.vocab_size * spec_.hidden_size * 2
    at = next(
        i for i in range(64, size, 64) if int.from_bytes(data[i + 8 : i + 16], "little") == nbytes
    )
    start = int.from_bytes(data[at + 16 : at + 24], "little")
    header = data[at : at + 16] + (size + 64).to_bytes(8, "little") + data[at + 24 : at + 64]
    (tmp_path / "b" / weights).write_bytes(data + header + data[start : start + nbytes])
    assert read(*made).duplicate_weight_bytes == nbytes


def only(warnings: tuple[str, ...], text: str) -> str:
    (found,) = [w for w in warnings if text in w]
    return found


def test_lint_of_a_clean_program(bundle: Any) -> None:
    model = dataclasses.replace(CAUSAL["q-mqa"], num_attention_heads=2, head_dim=32)
    _, made = bundle(model)
    assert read(*made).warnings == ()


def test_lint_transposed_update(bundle: Any, tmp_path: Path) -> None:
    def change(_: Any, block: Any) -> None:
        route_through(block, first(block, "slice_update"), "update", "transpose")

    _, made = bundle(CAUSAL["q-gqa"], "shared")
    assert not [w for w in read(*made).warnings if "2278" in w]
    warnings = read(*edited(made, tmp_path / "b", change)).warnings
    assert only(warnings, "coremltools#2278").startswith("cache_0_kv: a transpose between")


def test_lint_state_width_and_read_transposes(bundle: Any) -> None:
    _, made = bundle(CAUSAL["q-mqa"], "shared")
    (warning,) = read(*made).warnings
    assert warning.startswith("cache_0_kv and 1 more: last dimension 16 is not a multiple of 32")
    _, made = bundle(CAUSAL["q-gqa"], "shared")
    (warning,) = read(*made).warnings
    assert "transposed on every read" in warning


def test_lint_long_context(tmp_path: Path) -> None:
    model = dataclasses.replace(
        CAUSAL["q-mqa"], num_hidden_layers=1, max_position_embeddings=40_000
    )
    artifact, directory = make_bundle("coreml", random_decoder(model), tmp_path / "b", dtype="fp16")
    assert only(read(artifact, directory).warnings, "a dimension of 40000")
    # and the program itself is right there: positions are not narrowed to 16 bits
    decoder, run = random_decoder(model), load(artifact, directory, threads=1, capacity=40_000)
    run.position = 33_000
    got = run.decode(5)
    alone = decoder.run(torch.tensor([[5]]), torch.tensor([33_000]), zeros_before(decoder, 33_000))
    np.testing.assert_allclose(got, alone[0, 0].numpy(), atol=5e-2, rtol=0)


def zeros_before(decoder: Decoder, past: int) -> Any:
    """Eager attention over ``past`` zero rows, as a fresh state holds, and the new token."""
    from edgeqkv.attention import scores_softmax_values

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (torch.cat([torch.zeros(1, past, *t.shape[2:]), t], 1) for t in (k, v))
        return scores_softmax_values(q, k, v, decoder.spec.attention_scale, None)

    return attend


def test_lint_mixed_input_shapes(bundle: Any, tmp_path: Path) -> None:
    def change(proto: Any, _: Any) -> None:
        proto.description.input[1].type.multiArrayType.ClearField("shapeRange")

    _, made = bundle(CAUSAL["q-mqa"])
    warnings = read(*edited(made, tmp_path / "b", change)).warnings
    assert only(warnings, "coremltools#2548").startswith("positions: an input of fixed shape")


def test_lint_four_bit_palettised(bundle: Any, tmp_path: Path) -> None:
    _, (artifact, directory) = bundle(CAUSAL["q-mqa"])
    model = ct.models.MLModel(str(directory / artifact.entry), skip_model_load=True)
    config = ct.optimize.coreml.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=64)
    small = ct.optimize.coreml.palettize_weights(
        model, ct.optimize.coreml.OptimizationConfig(global_config=config)
    )
    small.save(str(tmp_path / artifact.entry))
    warnings = read(artifact, tmp_path).warnings
    assert only(warnings, "coremltools#2716")


@pytest.mark.parametrize("damage", ["model", "weights", "cut"])
def test_damaged_package(damage: str, bundle: Any, tmp_path: Path) -> None:
    _, (artifact, directory) = bundle(CAUSAL["q-mqa"])
    shutil.copytree(directory, tmp_path / "b")
    data = tmp_path / "b" / artifact.entry / "Data" / "com.apple.CoreML"
    weights = data / "weights" / "weight.bin"
    if damage == "model":
        (data / "model.mlmodel").write_bytes(b"not a protobuf")
    elif damage == "weights":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-200])
    with pytest.raises(BundleError):
        read(artifact, tmp_path / "b")
