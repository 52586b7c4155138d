"""What the ExecuTorch backend writes: planned memory, in-place cache, weights stored once; and the audit."""

import dataclasses

import pytest

pytest.importorskip("executorch.exir")

from edgeqkv.cache import cache_spec
from edgeqkv.errors import BundleError, UnsupportedError
from edgeqkv.presets import preset
from edgeqkv.quant import uniform
from export.backends.executorch_pte import load_pte
from export.backends.read_executorch import read
from export.backends.to_executorch import (
    ATTENTION,
    ENTRY,
    LEAST_CHUNK,
    capacities,
    check,
    formulation,
    prefill_chunk,
)
from export.lowering import Request
from tests.et_bundles import big, et_bundle
from tests.variants import VARIANTS, spec


def request(variant="q-gqa", weights="fp32", dtype="fp32", capacity=None, **options):
    model = VARIANTS[variant]
    cache = cache_spec(model, dtype=dtype, capacity=capacity)
    return Request(model, cache, uniform(weights), options)


def operators(directory):
    pte = load_pte(directory / ENTRY)
    return {f"{o.name}" for plan in pte.program.execution_plan for o in plan.operators}


def test_check_names_what_is_allowed():
    check(request())
    for bad, message in (
        (request(weights="fp16"), "wte as fp16 is not supported; allowed: fp32, int8 with one"),
        (request(onnx_attention="gemm"), "onnx_attention.*allowed: et_attention"),
        (request(et_attention="fast"), "fast.*allowed: auto, plain, custom"),
        (request(dtype="fp16"), "fp16.*allowed: fp32"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            check(bad)


def test_attention_is_chosen_by_measurement():
    """Custom only where one query head reads each key/value head."""
    chosen = {v: formulation(request(v)) for v in ("q-k=v", "q-gqa", "q-mqa", "qkv", "(q=k-v)+")}
    assert chosen == {
        "q-k=v": "custom-sdpa",
        "qkv": "custom-sdpa",
        "q-gqa": "plain-bmm",
        "q-mqa": "plain-bmm",
        "(q=k-v)+": "full",
    }
    assert formulation(request("q-k=v", et_attention="plain")) == "plain-bmm"
    assert formulation(request("q-mqa", et_attention="custom")) == "custom-sdpa"


def test_capacities():
    model = spec(max_position_embeddings=4096)
    expected = {4096: (1024, 2048, 4096), 100: (50, 100), 64: (32, 64), 40: (40,), 1: (1,)}
    assert {c: capacities(cache_spec(model, capacity=c)) for c in expected} == expected


@pytest.mark.parametrize(
    ("preset_name", "attention", "expected"),
    [
        ("300m-q-mqa", "plain", 80),  # 5120 bytes per token / (16 heads x 4 bytes)
        ("300m-q-k=v", "plain", 128),
        ("300m-q-mqa", "custom", 128),  # keeps no scores
    ],
)
def test_scores_of_a_prefill_take_what_the_cache_takes(preset_name, attention, expected):
    model = preset(preset_name)
    asked = Request(model, cache_spec(model), uniform("fp32"), {})
    assert prefill_chunk(asked, ATTENTION[attention]) == expected
    short = dataclasses.replace(asked, cache=cache_spec(model, capacity=40))
    assert prefill_chunk(short, ATTENTION[attention]) == 40
    tiny = request("q-mqa")
    assert prefill_chunk(tiny, "plain-bmm") == LEAST_CHUNK


@pytest.mark.parametrize(
    ("variant", "layout", "attention"),
    [("q-gqa", "shared", "plain"), ("gqa", "separate", "plain"), ("q-gqa", "shared", "custom")],
)
def test_the_cache_is_the_formula_and_written_in_place(variant, layout, attention):
    _, artifact, directory = et_bundle(variant, layout, attention)
    facts = read(artifact, directory)
    assert facts.bytes_per_token == artifact.cache.bytes_per_token
    assert [t.name for t in facts.cache_tensors] == artifact.cache.names()
    assert [t.role for t in facts.cache_tensors] == list(artifact.cache.roles)
    assert [t.layer for t in facts.cache_tensors] == [0] * artifact.cache.tensors_per_layer
    assert {t.dtype for t in facts.cache_tensors} == {"fp32"}
    assert facts.cache_copies == ()
    llm = {o for o in operators(directory) if o.startswith("llama::")}
    assert llm == (set() if attention == "plain" else {"llama::custom_sdpa", "llama::update_cache"})
    assert len(facts.warnings) == (attention == "custom")


def test_every_capacity_has_its_arena_and_the_weights_are_stored_once():
    decoder, artifact, directory = big()
    cache = artifact.cache
    assert artifact.details["cache_arena_bytes"] == {
        str(c): c * cache.bytes_per_token for c in artifact.capacities
    }
    # of what is planned beside it only the mask [S,1,C] follows the capacity, so no second cache
    _, middle, large = (artifact.details["planned_bytes"][str(c)][1] for c in artifact.capacities)
    assert large - middle == 256 * 4 * artifact.prefill_chunk < 256 * cache.bytes_per_token
    plans = load_pte(directory / ENTRY).program.execution_plan
    assert [p.name for p in plans] == [f"forward_{c}" for c in artifact.capacities]
    facts = read(artifact, directory)
    assert facts.duplicate_weight_bytes == 0
    weights = 4 * sum(p.numel() for p in decoder.parameters())
    # masks' column numbers and a few scalars beside the weights
    columns = 4 * sum(artifact.capacities)
    assert weights + columns <= facts.weight_bytes < weights + columns + 256
    # programs and XNNPACK graphs of three methods, nothing that grows with the weights
    assert facts.weight_bytes < artifact.nbytes < facts.weight_bytes + 3 * 64 * 1024
    embedding = 4 * decoder.wte.weight.numel()
    assert artifact.details["shared_constant_bytes"] >= embedding
    assert facts.bytes_per_token == cache.bytes_per_token
    assert [t.shape for t in facts.cache_tensors] == [(2, 512, 16)] * 2


def test_two_buffers_under_a_shared_manifest_are_seen():
    _, honest, directory = et_bundle("q-gqa", "separate")
    claimed = dataclasses.replace(honest, cache=dataclasses.replace(honest.cache, layout="shared"))
    facts = read(claimed, directory)
    assert [t.role for t in facts.cache_tensors] == ["key", "value"]
    assert facts.bytes_per_token == 2 * claimed.cache.bytes_per_token


def test_a_cache_that_is_copied_each_step_is_seen(tmp_path):
    """The same graph without the in-place pass: index_put into a second buffer, then copy_ back."""
    import torch
    from executorch.exir import to_edge_transform_and_lower

    from edgeqkv.quiet import quiet
    from export.backends.executorch_program import Plain

    decoder, artifact, _ = et_bundle("q-mqa", "shared")
    ids, positions = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)
    with quiet():
        program = torch.export.export(Plain(decoder, artifact.cache, 40), (ids, positions))
        copied = to_edge_transform_and_lower(program).to_executorch()
    (tmp_path / ENTRY).write_bytes(copied.buffer)
    facts = read(artifact, tmp_path)
    assert len(facts.cache_tensors) == 1
    assert any("aten::index_put" in copy for copy in facts.cache_copies)
    assert any("rewritten whole by aten::copy_" in copy for copy in facts.cache_copies)


def test_a_damaged_program_is_refused(tmp_path):
    _, artifact, directory = et_bundle("q-gqa", "shared")
    data = (directory / ENTRY).read_bytes()
    for bad in (b"", b"ET12" * 100, data[:100], data[:3000], data[:-1], data[:200] + bytes(3000)):
        (tmp_path / ENTRY).write_bytes(bad)
        with pytest.raises(BundleError):
            read(artifact, tmp_path)
