"""Integer weights in a .pte: the integers that were asked for, once, and what they compute."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("executorch.exir")

from edgeqkv.artifact import Artifact
from edgeqkv.cache import cache_spec
from edgeqkv.errors import UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quant import QuantRecipe, Rule, uniform
from edgeqkv.quiet import quiet
from edgeqkv.runner import open_runner
from export.audit import find_problems, read_facts
from export.backends.executorch_pte import load_pte
from export.backends.executorch_weights import with_stored_weights
from export.backends.to_executorch import check
from export.lowering import Request
from export.quantise import QuantTensor, apply_rounding, quantise
from export.verify import verify_bundle
from tests.bundles import make_bundle
from tests.parity import random_ids
from tests.variants import VARIANTS, random_decoder

Made = tuple[Decoder, dict[str, QuantTensor], Artifact, Path]


@functools.cache
def made(variant: str, weights: str, context: int) -> Made:
    """One layer; (rounded decoder, its integers, bundle). Never write into the folder."""
    model = dataclasses.replace(
        VARIANTS[variant], num_hidden_layers=1, max_position_embeddings=context
    )
    decoder = random_decoder(model)
    tensors = quantise(decoder, uniform(weights))
    folder = Path(tempfile.mkdtemp(prefix="edgeqkv-etq-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    artifact, bundle = make_bundle("executorch", decoder, folder / "b", weights=weights)
    return decoder, tensors, artifact, bundle


def xnnpack_bytes(tensor: QuantTensor) -> bytes:
    """As XNNPACK reads a matrix: int8, or two columns a byte with zero point 8, the first low."""
    q = tensor.q.numpy()
    if tensor.bits == 8:
        return q.tobytes()
    halves = (q + 8).astype(np.uint8)
    return (halves[:, ::2] | halves[:, 1::2] << 4).tobytes()


CASES = [("q-gqa", "int4", 64), ("untied-tanh", "int8", 40)]  # two methods; two large matrices


@pytest.mark.parametrize("case", CASES)
def test_the_file_holds_the_integers_once(case: tuple[str, str, int]) -> None:
    decoder, tensors, artifact, folder = made(*case)
    pte = load_pte(folder / artifact.entry)
    data = {pte.segment(n.segment_index) for n in pte.program.named_data}
    looked_up = {"wte"} if "wte" in tensors and not decoder.spec.tie_word_embeddings else set()
    for name in set(tensors) - looked_up:
        assert xnnpack_bytes(tensors[name]) in data, name
    facts = read_facts(folder, artifact)
    assert find_problems(artifact, facts) == []
    assert facts.duplicate_weight_bytes == 0
    # The recipe's bytes; and scales a second time for a tied lookup, in float32 for int8, masks.
    recipe = artifact.quantisation.recipe.weight_bytes(decoder.spec)
    rows = sum(t.scale.numel() for t in tensors.values())
    columns = 4 * sum(artifact.capacities)
    assert recipe <= facts.weight_bytes <= recipe + 4 * rows + columns + 256
    assert artifact.details["activations"] == "int8_asym_per_token"
    assert any("quantized kernels" in warning for warning in facts.warnings)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_torch_says_that_rounded_activations_give(
    case: tuple[str, str, int],
) -> None:
    decoder, tensors, artifact, folder = made(*case)
    recipe = artifact.quantisation.recipe
    with quiet():
        simulated = with_stored_weights(decoder, recipe, tensors)
        ids = random_ids(decoder, 9)
        expected = simulated(torch.from_numpy(ids)[None])[0].numpy()
    runner = open_runner(folder)
    got = [runner.prefill(ids[:5]), *(runner.decode(int(token)) for token in ids[5:])]
    runner.close()
    # A float that differs in its last bit may round to the next activation step, so not to 1e-6.
    rounded = decoder(torch.from_numpy(ids)[None])[0].numpy()
    near = np.square(np.stack(got) - expected[4:]).mean() ** 0.5
    far = np.square(np.stack(got) - rounded[4:]).mean() ** 0.5
    assert near < far / 2
    assert far < 0.05 * rounded.std()


def test_it_verifies_against_the_rounded_model() -> None:
    decoder, _, _, folder = made(*CASES[0])
    result = verify_bundle(folder, decoder=decoder)
    assert result.passed, result.failure


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_lookup_gives_the_rounded_rows_exactly(weights: str) -> None:
    decoder, recipe = random_decoder(VARIANTS["q-gqa"]), uniform(weights)
    tensors = quantise(decoder, recipe)
    apply_rounding(decoder, recipe, tensors)
    ids = torch.arange(decoder.spec.vocab_size)[None]
    with quiet():
        stored = with_stored_weights(decoder, recipe, tensors)
        assert torch.equal(stored.wte(ids), decoder.wte(ids))
        assert torch.equal(stored.wpe(ids[0, :9]), decoder.wpe(ids[0, :9]))
    assert stored.ln_f.weight is decoder.ln_f.weight  # float tensors are not copied


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([Rule("*", "fp16")], "wte as fp16 is not supported.*fp16 for wpe only"),
        ([Rule("*", "int8", 32)], "wte as int8 with 32 columns per scale is not supported"),
        ([Rule("*.c_fc", "int4", 16)], "c_fc as int4 with 16 columns per scale.*multiple of 32"),
    ],
)
def test_what_xnnpack_cannot_do_is_refused_before_work(rules: list[Rule], words: str) -> None:
    model = VARIANTS["q-gqa"]
    with pytest.raises(UnsupportedError, match=words) as error:
        check(Request(model, cache_spec(model), QuantRecipe(tuple(rules))))
    assert "\n" not in str(error.value)


def test_mixed_recipes_and_caches_that_are_allowed() -> None:
    model = VARIANTS["untied-tanh"]
    mixed = (Rule("w*", "fp16"), Rule("*.mlp.*", "int4"), Rule("lm_head", "int8"))
    check(Request(model, cache_spec(model), QuantRecipe(mixed)))
    with pytest.raises(UnsupportedError, match="cache dtype int8 is not supported; allowed: fp32"):
        check(Request(model, cache_spec(model, dtype="int8"), uniform("int4")))
