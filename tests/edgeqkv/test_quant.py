"""Recipes: what matches, what it costs, and everything a wrong one may say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqkv.errors import SpecError, UnsupportedError
from edgeqkv.presets import preset
from edgeqkv.quant import (
    GROUPED,
    SCHEMES,
    Quantisation,
    QuantRecipe,
    Rule,
    check_groups,
    matrices,
    read_recipe,
    uniform,
)
from tests.variants import VARIANTS, spec

Q_MQA = VARIANTS["q-mqa"]
RULES = st.builds(
    Rule,
    st.sampled_from(["*", "wte", "h.*.mlp.*", "h.0.*", "*.q_proj"]),
    st.sampled_from(list(SCHEMES)),
)


def test_the_first_rule_that_matches_wins_and_the_rest_stay_fp32():
    recipe = QuantRecipe((Rule("h.0.*", "fp16"), Rule("h.*", "int4", 16)))
    assert recipe.rule_for("h.0.mlp.c_fc").weights == "fp16"
    assert recipe.rule_for("h.1.mlp.c_fc") == Rule("h.*", "int4", 16)
    assert recipe.rule_for("wte").weights == "fp32"


@given(st.lists(RULES, max_size=5))
def test_round_trip(rules):
    recipe = QuantRecipe(tuple(rules))
    assert QuantRecipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize("weights", SCHEMES)
def test_a_uniform_recipe_is_called_by_its_scheme(weights):
    assert uniform(weights).label == weights
    assert uniform("int4", 64).label == "int4"
    positions = uniform(weights).rule_for("wpe").weights
    assert positions == ("fp16" if weights in GROUPED else weights)


def test_a_mixed_recipe_names_what_is_in_it():
    assert QuantRecipe((Rule("wte", "int8"), Rule("*", "int4"))).label == "int8+int4"
    assert QuantRecipe().label == "fp32"


def test_bytes_of_the_papers_models():
    """264.9 M parameters x 0.5625 bytes = 149 MB: the floor the 300M Q-MQA model is held to."""
    model = preset("300m-q-mqa")
    nbytes = {w: uniform(w).weight_bytes(model) for w in SCHEMES}
    assert nbytes["fp32"] == 4 * model.num_parameters() == 4 * 264_862_976
    vectors = sum(s[0] for s in model.parameter_shapes().values() if len(s) == 1)
    positions = 2048 * 1024
    integers = model.num_parameters() - vectors - positions
    assert nbytes["int4"] == integers * 0.5625 + positions * 2 + vectors * 4 < 153e6
    assert nbytes["int4"] < nbytes["int8"] < nbytes["fp16"] < nbytes["fp32"]


@given(st.integers(1, 50), st.sampled_from([32, 64, 96]), st.sampled_from(GROUPED))
def test_bytes_by_hand(rows, width, weights):
    bits = SCHEMES[weights] / 8
    assert Rule("*", weights, 32).nbytes((rows, width)) == rows * (width * bits + width / 32 * 2)
    assert Rule("*", weights, 0).nbytes((rows, width)) == rows * (width * bits + 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("*", "int3"), "allowed: fp32, fp16, int8, int4"),
        (("", "int4"), "module name pattern"),
        (("*", "int4", 24), "power of two"),
        (("*", "int4", 8), "power of two"),
        (("*", "int4", -32), "power of two"),
        (("*", "int4", True), "power of two"),
        (("*", "fp16", 32), "contradicts weights fp16"),
    ],
)
def test_wrong_rules_are_refused(arguments, words):
    with pytest.raises(SpecError, match=words):
        Rule(*arguments)


def test_a_recipe_from_a_file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        '[[rules]]\npattern = "wte"\nweights = "int8"\n\n'
        '[[rules]]\npattern = "h.*"\nweights = "int4"\ngroup_size = 16\n'
    )
    recipe = read_recipe(path, Q_MQA)
    assert recipe == QuantRecipe((Rule("wte", "int8", 0), Rule("h.*", "int4", 16)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules = 3", "list of tables"),
        ("[[rules]]\nweights = 'int4'", "lacks 'pattern'"),
        ("[[rules]]\npattern = 'wte'\nweights = 'int5'", "allowed: fp32, fp16, int8, int4"),
        ("[[rules]]\npattern = 'wte'\nbits = 4\nweights = 'int4'", "unknown key 'bits'"),
        (
            "[[rules]]\npattern = 'h.*.mpl.*'\nweights = 'int4'",
            "matches no module; give one of the model's: wte",
        ),
        ("[[rules]]\npattern = 'h.0.ln_1'\nweights = 'fp16'", "matches no module"),
        (
            "[[rules]]\npattern = '*'\nweights = 'int8'\n[[rules]]\npattern = 'wte'\nweights = 'int4'",
            "'wte' never applies, earlier rules match all",
        ),
        ("[[rules]]\npattern = '['\nweights = 'int4'", "'\\[' matches no module"),
        ("[[rules]\n", "recipe"),
        ("[rule]\n", "unknown key 'rule'"),
        ("\xff", "recipe"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, words):
    path = tmp_path / "recipe.toml"
    path.write_text(text, "latin-1")
    with pytest.raises(SpecError, match=words) as error:
        read_recipe(path, Q_MQA)
    assert "\n" not in str(error.value)
    assert "recipe.toml" in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SpecError, match="does not exist"):
        read_recipe(tmp_path / "gone.toml", Q_MQA)


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_every_matrix_and_nothing_else_may_be_quantised(model):
    shapes = model.parameter_shapes()
    names = matrices(model)
    assert {len(shapes[f"{n}.weight"]) for n in names} == {2}
    rest = {n for n in shapes if n.removesuffix(".weight") not in names}
    assert all(len(shapes[n]) == 1 for n in rest)
    assert uniform("fp32").weight_bytes(model) == 4 * sum(math.prod(s) for s in shapes.values())


def test_a_group_that_does_not_fit_is_refused_by_name():
    model = spec(intermediate_size=80)
    check_groups(model, uniform("int4", 16))
    check_groups(model, uniform("int8"))
    with pytest.raises(UnsupportedError, match=r"h\.0\.mlp\.c_proj has 80 input columns"):
        check_groups(model, uniform("int4", 32))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "magic"}, "allowed: none, rtn, gptq"),
        ({"recipe": {"rules": [{"pattern": "*", "weights": "int3"}]}}, "int3"),
        ({"cache_rotation": "twirl"}, "allowed: none, hadamard, balanced"),
        ({"calibration_tokens": "many"}, "calibration_tokens"),
        ({"surprise": 1}, "unknown key 'surprise'"),
    ],
)
def test_a_manifest_s_quantisation_is_read_strictly(changes, words):
    data = {
        "recipe": uniform("int4").to_dict(),
        "method": "gptq",
        "calibration_sha256": "0" * 64,
        "calibration_tokens": 4096,
        "cache_rotation": "none",
    }
    assert Quantisation.from_dict(data).recipe == uniform("int4")
    with pytest.raises(SpecError, match=words):
        Quantisation.from_dict(data | changes)
