"""Integer weights in a .mlpackage: the integers that were asked for, once, and what they compute."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device_bench.runners.mil_interpreter import MILInterpreter
from edgeqkv.cache import cache_spec
from edgeqkv.errors import UnsupportedError
from edgeqkv.quant import QuantRecipe, Rule, uniform
from export.audit import find_problems, read_facts
from export.backends.coreml_program import StatelessDecoder
from export.backends.coreml_weights import with_integers
from export.backends.to_coreml import check
from export.lowering import Request
from export.quantise import QuantTensor, quantise
from export.verify import verify_bundle
from tests.bundles import make_bundle
from tests.variants import VARIANTS, random_decoder

pytest.importorskip("coremltools")


def stored(package: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(data, scale) of every constexpr of the package, read back from disk."""
    found = []
    program = MILInterpreter(package)
    for op in program.constants:
        assert op.op_type == "constexpr_blockwise_shift_scale"
        assert op.offset is None
        found.append((np.asarray(op.data.val).astype(np.int8), np.asarray(op.scale.val)))
    return found


def holds(constants: list[tuple[np.ndarray, np.ndarray]], tensor: QuantTensor) -> bool:
    q, scale = tensor.q.numpy(), tensor.scale.numpy()
    return any(np.array_equal(q, data) and np.array_equal(scale, s) for data, s in constants)


@pytest.mark.parametrize(("variant", "weights"), [("q-mqa", "int4"), ("untied-tanh", "int8")])
def test_the_package_holds_the_integers_once_and_computes_them(
    variant: str, weights: str, tmp_path: Path
) -> None:
    decoder = random_decoder(dataclasses.replace(VARIANTS[variant], num_hidden_layers=1))
    tensors = quantise(decoder, uniform(weights))
    artifact, folder = make_bundle("coreml", decoder, tmp_path / "b", dtype="fp16", weights=weights)
    constants = stored(folder / artifact.entry)
    assert len(constants) == len(tensors)
    assert all(holds(constants, tensor) for tensor in tensors.values())
    assert all(scale.dtype == np.float16 for _, scale in constants)
    facts = read_facts(folder, artifact)
    assert find_problems(artifact, facts) == []
    assert facts.duplicate_weight_bytes == 0
    # The recipe's bytes with vectors in fp16, a tied embedding once; and masks' column numbers.
    vectors = [s for s in decoder.spec.parameter_shapes().values() if len(s) == 1]
    expected = artifact.quantisation.recipe.weight_bytes(decoder.spec)
    expected -= 2 * sum(math.prod(shape) for shape in vectors)
    columns, head_bias = 4 * artifact.cache.capacity, 2 * decoder.spec.vocab_size
    assert expected <= facts.weight_bytes <= expected + columns + head_bias + 128
    result = verify_bundle(folder, decoder=decoder)
    assert result.passed, result.failure
    # fp16 arithmetic on the same numbers: far inside what int4 may differ from its reference
    assert max(c.max_abs_in_std for c in result.comparisons) < 2e-2


def test_integers_are_never_rounded_again(tmp_path: Path) -> None:
    """Integers that no rounding of the weight would give, as calibration makes them."""
    from export.backends import to_coreml

    decoder = random_decoder(dataclasses.replace(VARIANTS["q-mqa"], num_hidden_layers=1))
    tensors = quantise(decoder, uniform("int4"))
    odd = tensors["h.0.mlp.c_fc"]
    q = torch.where(odd.q.abs() > 3, odd.q.sign() * 2, odd.q).to(torch.int8)
    tensors["h.0.mlp.c_fc"] = dataclasses.replace(odd, q=q)
    cache = cache_spec(decoder.spec, dtype="fp16")
    request = Request(decoder.spec, cache, uniform("int4"), tensors=tensors)
    lowered = to_coreml.lower(decoder, request, tmp_path)
    constants = stored(tmp_path / lowered.entry)
    assert all(holds(constants, tensor) for tensor in tensors.values())


def test_a_tied_matrix_is_in_the_trace_once() -> None:
    decoder = random_decoder(dataclasses.replace(VARIANTS["q-mqa"], num_hidden_layers=1))
    tensors = quantise(decoder, uniform("int4"))
    program = StatelessDecoder(with_integers(decoder, tensors), 8).eval()
    example = torch.zeros(1, 3, dtype=torch.int32), torch.arange(3).int()
    traced = torch.jit.trace(program, example, check_trace=False)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds.count("edgeqkv::dequantise") == len(tensors)


def test_a_mixed_recipe(tmp_path: Path) -> None:
    from export.backends import to_coreml
    from export.quantise import apply_rounding

    decoder = random_decoder(dataclasses.replace(VARIANTS["q-gqa"], num_hidden_layers=1))
    recipe = QuantRecipe(
        (Rule("wte", "int8"), Rule("*.c_fc", "int4", 16), Rule("*.q_proj", "int8", 32))
    )
    tensors = quantise(decoder, recipe)
    apply_rounding(decoder, recipe, tensors)
    cache = cache_spec(decoder.spec, dtype="fp16")
    request = Request(decoder.spec, cache, recipe, tensors=tensors)
    lowered = to_coreml.lower(decoder, request, tmp_path)
    constants = stored(tmp_path / lowered.entry)
    assert len(constants) == 3
    assert all(holds(constants, tensor) for tensor in tensors.values())
    assert lowered.details["stored_weights"] == "int8+int4"


@pytest.mark.parametrize(
    ("weights", "dtype", "options", "words"),
    [
        ("int4", "fp16", {"coreml_precision": "fp32"}, "int4.*fp32 compute.*allowed: fp32$"),
        ("int4", "int8", {}, "states are float16 only, allowed: fp16"),
    ],
)
def test_what_core_ml_cannot_do_is_refused_before_work(
    weights: str, dtype: str, options: dict[str, Any], words: str
) -> None:
    model = VARIANTS["q-mqa"]
    request = Request(model, cache_spec(model, dtype=dtype), uniform(weights), options)
    with pytest.raises(UnsupportedError, match=words) as error:
        check(request)
    assert "\n" not in str(error.value)
