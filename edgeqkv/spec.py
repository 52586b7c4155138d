"""ModelSpec: what a model is, as data. No torch here.

A variant is four independent facts, never a class: which projections share weights
(``qkv_sharing``), how many key/value heads there are (``num_key_value_heads``), how the
query is made (``query_mode``) and whether attention is causal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from edgeqkv.errors import SpecError

QKV_SHARINGS = ("none", "q=k", "k=v", "q=k=v")
QUERY_MODES = ("projected", "identity", "residual", "residual_gelu")
MOST = 10_000  # layers, and heads
HIDDEN_ACTS = ("gelu", "gelu_new")  # exact erf, tanh approximation: Hugging Face's names


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A pre-LayerNorm decoder with learned absolute positions, in Hugging Face's field names.

    ``num_used_tokens``: ids below it exist in the tokenizer; the rest of ``vocab_size`` is padding
    that must never be sampled (None: all are used). ``attention_scale`` multiplies q.k.
    ``score_position_features``: m of the (Q=K-V)+ term, 0 without it.

    Raises:
        SpecError: a field is out of range or two fields contradict each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    attention_scale: float
    qkv_sharing: str = "none"
    query_mode: str = "projected"
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    layer_norm_bias: bool = True
    linear_bias: bool = True
    tie_word_embeddings: bool = True
    is_causal: bool = True
    score_position_features: int = 0
    num_used_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE_INTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 2**31 - 1:
                raise SpecError(f"{name} is {value!r}; it must be a positive integer")
        for name in ("num_hidden_layers", "num_attention_heads"):  # which are counted one by one
            if getattr(self, name) > MOST:
                raise SpecError(f"{name} is {getattr(self, name)}; it must be {MOST} or less")
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        for name in ("attention_scale", "layer_norm_eps"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not (math.isfinite(value) and value > 0)
            ):
                raise SpecError(f"{name} is {value!r}; it must be a positive finite number")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise SpecError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        self._check_relations()

    def _check_relations(self) -> None:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise SpecError(
                f"num_key_value_heads is {groups}; it must divide num_attention_heads {heads}"
            )
        if self.qkv_sharing in ("q=k", "q=k=v") and groups != heads:
            raise SpecError(
                f"qkv_sharing {self.qkv_sharing} needs as many key as query heads; found "
                f"num_key_value_heads {groups} and num_attention_heads {heads}"
            )
        if self.query_mode != "projected" and self.qkv_sharing in ("q=k", "q=k=v"):
            raise SpecError(
                f"query_mode {self.query_mode} contradicts qkv_sharing {self.qkv_sharing}: "
                "the query cannot be both the input and the key; allowed with it: none, k=v"
            )
        if self.query_mode != "projected" and self.query_size != self.hidden_size:
            raise SpecError(
                f"query_mode {self.query_mode} needs num_attention_heads*head_dim == hidden_size; "
                f"found {self.query_size} and {self.hidden_size}"
            )
        features = self.score_position_features
        if not isinstance(features, int) or isinstance(features, bool) or features < 0:
            raise SpecError(f"score_position_features is {features!r}; it must be 0 or more")
        if features and self.is_causal:
            raise SpecError(
                "score_position_features belongs to the non-causal (+) variants; set is_causal false"
            )
        used = self.num_used_tokens
        if used is not None and (
            not isinstance(used, int) or isinstance(used, bool) or not 0 < used <= self.vocab_size
        ):
            raise SpecError(f"num_used_tokens is {used!r}; allowed: 1 to {self.vocab_size}")

    @property
    def query_size(self) -> int:
        """Width of the query: num_attention_heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of one key (or value): num_key_value_heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def used_tokens(self) -> int:
        """Token ids in [0, used_tokens) may be fed and sampled."""
        return self.num_used_tokens or self.vocab_size

    @property
    def key_is_value(self) -> bool:
        """True when key and value are the same numbers at read time.

        With learned positions nothing is applied to the key on read, so sharing the projection
        is enough; a rotary encoding would have to be asked here too.
        """
        return self.qkv_sharing in ("k=v", "q=k=v")

    @property
    def projections(self) -> tuple[str, ...]:
        """Input projections the attention really has, in the order q, k, v."""
        names = {"none": "qkv", "q=k": "kv", "k=v": "qk", "q=k=v": "k"}[self.qkv_sharing]
        return tuple(f"{n}_proj" for n in names if not (n == "q" and self.query_mode == "identity"))

    @property
    def label(self) -> str:
        """The papers' name of the variant, e.g. ``Q-K=V``, ``Q-MQA``, ``W_Q=I``."""
        groups = self.num_key_value_heads
        if groups == self.num_attention_heads:
            names = {"none": "QKV", "q=k": "Q=K-V", "k=v": "Q-K=V", "q=k=v": "Q=K=V"}
            name = names[self.qkv_sharing]
        else:
            name = "MQA" if groups == 1 else f"GQA-{groups}"
            name = f"Q-{name}" if self.key_is_value else name
        if self.score_position_features:
            name = f"({name})+"
        if self.query_mode == "projected":
            return name
        query = {"identity": "W_Q=I", "residual": "q=x+q", "residual_gelu": "q=x+gelu(q)"}
        return query[self.query_mode] if name == "QKV" else f"{query[self.query_mode]}, {name}"

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every stored tensor; weights are (out, in). A tied head has none of its own."""
        d, inner = self.hidden_size, self.intermediate_size
        rows = {"q_proj": self.query_size, "k_proj": self.key_value_size}
        rows["v_proj"] = rows["k_proj"]
        shapes: dict[str, tuple[int, ...]] = {
            "wte.weight": (self.vocab_size, d),
            "wpe.weight": (self.max_position_embeddings, d),
        }

        def norm(name: str) -> None:
            shapes[f"{name}.weight"] = (d,)
            if self.layer_norm_bias:
                shapes[f"{name}.bias"] = (d,)

        def linear(name: str, out: int, into: int) -> None:
            shapes[f"{name}.weight"] = (out, into)
            if self.linear_bias:
                shapes[f"{name}.bias"] = (out,)

        for i in range(self.num_hidden_layers):
            norm(f"h.{i}.ln_1")
            for projection in self.projections:
                linear(f"h.{i}.attn.{projection}", rows[projection], d)
            linear(f"h.{i}.attn.o_proj", d, self.query_size)
            if self.score_position_features:
                shapes[f"h.{i}.attn.pos_w"] = (self.score_position_features,)
                shapes[f"h.{i}.attn.pos_b"] = (1,)
            norm(f"h.{i}.ln_2")
            linear(f"h.{i}.mlp.c_fc", inner, d)
            linear(f"h.{i}.mlp.c_proj", d, inner)
        norm("ln_f")
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes

    def num_parameters(self) -> int:
        """Trainable parameters, a tied embedding counted once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelSpec:
        """The inverse of :meth:`to_dict`; unknown and missing keys are errors, never guesses."""
        check_keys("model config", data, _FIELDS, _REQUIRED)
        return ModelSpec(**data)


def check_keys(
    what: str, data: Mapping[str, Any], allowed: frozenset[str], required: frozenset[str]
) -> None:
    """Raise SpecError unless ``data`` has every required key and only allowed ones."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{what} is {type(data).__name__}; it must be a JSON object")
    if unknown := sorted(set(data) - allowed):
        raise SpecError(
            f"{what} has unknown key {unknown[0]!r}; allowed: {', '.join(sorted(allowed))}"
        )
    if missing := sorted(required - set(data)):
        raise SpecError(f"{what} lacks {missing[0]!r}; required: {', '.join(sorted(required))}")


_FIELDS = frozenset(f.name for f in dataclasses.fields(ModelSpec))
_REQUIRED = frozenset(
    f.name for f in dataclasses.fields(ModelSpec) if f.default is dataclasses.MISSING
)
_POSITIVE_INTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
_BOOLS = ("layer_norm_bias", "linear_bias", "tie_word_embeddings", "is_causal")
_CHOICES = {"qkv_sharing": QKV_SHARINGS, "query_mode": QUERY_MODES, "hidden_act": HIDDEN_ACTS}
