"""QuantRecipe: which number format each weight is stored in, as ordered rules. No torch here."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from edgeqkv.errors import SpecError, UnsupportedError
from edgeqkv.spec import ModelSpec, check_keys

# Bits of the stored value. int8 and int4 add one 16-bit scale per group along the input axis.
SCHEMES = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
# The group sizes used when none is given: 0 is one scale per output row, the only form of int8
# that every runtime has (XNNPACK groups 4-bit weights only). No group in the floating formats.
GROUP_SIZES = {"fp32": 0, "fp16": 0, "int8": 0, "int4": 32}
GROUPED = ("int8", "int4")
METHODS = ("none", "rtn", "gptq")
ROTATIONS = ("none", "hadamard", "balanced")
_RULE = 'a rule is [[rules]] with pattern = "h.*", weights = "int8" and perhaps group_size = 32'


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of a recipe.

    pattern: shell pattern on the module's name, e.g. ``h.*.mlp.c_fc`` or ``wte``.
    group_size: input columns that share a scale; 0 for one scale per output row; None for the
        scheme's default.
    """

    pattern: str
    weights: str
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise SpecError(f"rule pattern is {self.pattern!r}; it must be a module name pattern")
        if self.weights not in SCHEMES:
            raise SpecError(f"weights is {self.weights!r}; allowed: {', '.join(SCHEMES)}")
        if self.group_size is None:
            object.__setattr__(self, "group_size", GROUP_SIZES[self.weights])
        size = self.group_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise SpecError(f"group_size is {size!r}; it must be 0 or a power of two from 16 on")
        if size and (size < 16 or size & (size - 1)):
            raise SpecError(f"group_size is {size}; it must be 0 or a power of two from 16 on")
        if size and self.weights not in GROUPED:
            raise SpecError(
                f"group_size {size} contradicts weights {self.weights}, which have no scale; leave it away"
            )

    def columns(self, width: int) -> int:
        """Input columns that share a scale in a matrix ``width`` columns wide."""
        return self.group_size or width

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix (out, in) in this format, 4-bit rows padded to whole bytes."""
        out, into = shape
        scales = 2 * -(-into // self.columns(into)) if self.weights in GROUPED else 0
        return out * (-(-into * SCHEMES[self.weights] // 8) + scales)


@dataclasses.dataclass(frozen=True)
class QuantRecipe:
    """Ordered rules, first match wins; a module that none matches stays fp32."""

    rules: tuple[Rule, ...] = ()

    def rule_for(self, module: str) -> Rule:
        for rule in self.rules:
            if fnmatchcase(module, rule.pattern):
                return rule
        return Rule("*", "fp32")

    @property
    def label(self) -> str:
        """Short name for tables: the scheme of a uniform recipe, else the rules' joined by ``+``."""
        last = self.rules[-1] if self.rules else Rule("*", "fp32")
        if self == uniform(last.weights, last.group_size):
            return last.weights
        return "+".join(dict.fromkeys(rule.weights for rule in self.rules))

    @property
    def schemes(self) -> frozenset[str]:
        """Every number format that a rule asks for."""
        return frozenset(rule.weights for rule in self.rules)

    def weight_bytes(self, spec: ModelSpec) -> int:
        """Bytes of all weights as the recipe stores them, a tied embedding counted once."""
        modules = set(matrices(spec))
        total = 0
        for name, shape in spec.parameter_shapes().items():
            module = name.removesuffix(".weight")
            if module in modules:
                total += self.rule_for(module).nbytes(shape)
            else:
                total += math.prod(shape) * 4
        return total

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> QuantRecipe:
        """The inverse of :meth:`to_dict`, and what a TOML recipe holds.

        Raises:
            SpecError: an unknown key, scheme or group size.
        """
        check_keys("recipe", data, frozenset({"rules"}), frozenset({"rules"}))
        fields = frozenset(f.name for f in dataclasses.fields(Rule))
        if not isinstance(data["rules"], (list, tuple)):
            raise SpecError("recipe rules must be a list of tables")
        for rule in data["rules"]:
            check_keys("recipe rule", rule, fields, frozenset({"pattern", "weights"}))
        return QuantRecipe(tuple(Rule(**rule) for rule in data["rules"]))


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """What a bundle's weights went through, recorded in its manifest.

    method: how integers were chosen: ``rtn`` to the nearest, ``gptq`` by calibration; ``none``
        where nothing is integer.
    calibration_sha256, calibration_tokens: the text that was read for either, else None.
    cache_rotation: the basis that cached rows are stored in (export/rotate.py): the model's own
        (``none``), ``hadamard``, or ``balanced``, which text was read for.
    """

    recipe: QuantRecipe = dataclasses.field(default_factory=QuantRecipe)
    method: str = "none"
    calibration_sha256: str | None = None
    calibration_tokens: int | None = None
    cache_rotation: str = "none"

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Quantisation:
        """Raises SpecError for a key, method or recipe that is unknown."""
        fields = frozenset(f.name for f in dataclasses.fields(Quantisation))
        check_keys("quantisation", data, fields, fields)
        if data["method"] not in METHODS:
            raise SpecError(
                f"quantisation method is {data['method']!r}; allowed: {', '.join(METHODS)}"
            )
        if data["cache_rotation"] not in ROTATIONS:
            raise SpecError(
                f"cache_rotation is {data['cache_rotation']!r}; allowed: {', '.join(ROTATIONS)}"
            )
        for key, kind in (("calibration_sha256", str), ("calibration_tokens", int)):
            if data[key] is not None and not isinstance(data[key], kind):
                raise SpecError(f"quantisation {key} is {data[key]!r}; it must be {kind.__name__}")
        return Quantisation(**{**data, "recipe": QuantRecipe.from_dict(data["recipe"])})


def uniform(weights: str, group_size: int | None = None) -> QuantRecipe:
    """Every matrix in one format; the learned positions stay fp16 under the integer schemes.

    Positions are read one row at a time and added, never multiplied: rounding them to 4 bits
    saves 1 % of the file and costs quality.

    Raises:
        SpecError: an unknown format or a group size that it cannot have.
    """
    rule = Rule("*", weights, group_size)
    if weights == "fp32":
        return QuantRecipe()
    positions = (Rule("wpe", "fp16"),) if weights in GROUPED else ()
    return QuantRecipe((*positions, rule))


def read_recipe(path: Path, spec: ModelSpec) -> QuantRecipe:
    """Read a TOML file of ``[[rules]]`` tables.

    Raises:
        SpecError: no file, not TOML, an unknown key or scheme, or a rule that matches no module of
            the model (a typo would otherwise leave weights unquantised in silence).
    """
    if not path.is_file():
        found = "is no file" if path.exists() else "does not exist"
        raise SpecError(f"recipe {path} {found}; give a TOML file of [[rules]]")
    try:
        recipe = QuantRecipe.from_dict(tomllib.loads(path.read_text("utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise SpecError(f"recipe {path} is not TOML: {e}; {_RULE}") from None
    except SpecError as e:
        raise SpecError(f"recipe {path}: {e}; {_RULE}") from None
    modules = matrices(spec)
    for rule in recipe.rules:
        if not any(fnmatchcase(module, rule.pattern) for module in modules):
            raise SpecError(
                f"recipe {path}: pattern {rule.pattern!r} matches no module; give one of the model's: "
                f"{', '.join(modules[:4])}, ..."
            )
    applied = [recipe.rule_for(module) for module in modules]
    for rule in recipe.rules:
        if rule not in applied:
            raise SpecError(
                f"recipe {path}: pattern {rule.pattern!r} never applies, earlier rules match all of its "
                "modules; the first match wins, so put it before them"
            )
    return recipe


def matrices(spec: ModelSpec) -> list[str]:
    """Names of the modules that a rule may speak of: those with a matrix as weight."""
    return [
        name.removesuffix(".weight")
        for name, shape in spec.parameter_shapes().items()
        if name.endswith(".weight") and len(shape) == 2
    ]


def check_groups(spec: ModelSpec, recipe: QuantRecipe) -> None:
    """Before any weight is read: every group must fit its matrix.

    Raises:
        UnsupportedError: a module's input width is not a multiple of its group size.
    """
    shapes = spec.parameter_shapes()
    for module in matrices(spec):
        rule = recipe.rule_for(module)
        width = shapes[f"{module}.weight"][1]
        if rule.weights in GROUPED and width % rule.columns(width):
            raise UnsupportedError(
                f"{module} has {width} input columns, no multiple of group size "
                f"{rule.group_size}; give --group-size a power of two that divides it, or 0"
            )
