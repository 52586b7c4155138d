"""Hugging Face transformers: importing this module registers MODEL_DIR with the Auto classes.

After ``import edgeqkv.hf``, ``AutoModelForCausalLM.from_pretrained(MODEL_DIR)`` and
``AutoTokenizer.from_pretrained(MODEL_DIR)`` work; no code comes from the folder.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from edgeqkv.attention import Attend, scores_softmax_values
from edgeqkv.config import MODEL_TYPE
from edgeqkv.errors import MissingDependencyError, RunError, UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.quiet import quiet
from edgeqkv.spec import ModelSpec
from edgeqkv.tokenizer import END_OF_TEXT

# Version 5 hands generate()'s cache over under another name, and optimum wants 4.
TRANSFORMERS = "4.57."

try:
    with quiet():  # transformers brings torchao, which tells what it could not load
        import transformers
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoTokenizer,
            GenerationMixin,
            PretrainedConfig,
            PreTrainedModel,
            PreTrainedTokenizerFast,
        )
        from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
        from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as e:
    raise MissingDependencyError(
        f"edgeqkv.hf needs transformers 4.57 ({e}); pip install 'edgeqkv[hf]'"
    ) from None

if not transformers.__version__.startswith(TRANSFORMERS):
    raise MissingDependencyError(
        f"edgeqkv.hf needs transformers 4.57, found {transformers.__version__}; "
        "pip install 'edgeqkv[hf]'"
    )


class EdgeQKVConfig(PretrainedConfig):  # type: ignore[misc]
    """ModelSpec's fields as attributes; :attr:`spec` checks them."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, provenance: dict[str, Any] | None = None, **kwargs: Any) -> None:
        for field in dataclasses.fields(ModelSpec):
            default = None if field.default is dataclasses.MISSING else field.default
            setattr(self, field.name, kwargs.pop(field.name, default))
        self.provenance = provenance or {}
        super().__init__(tie_word_embeddings=self.tie_word_embeddings, **kwargs)

    @property
    def spec(self) -> ModelSpec:
        """Raises SpecError when a field is missing or out of range."""
        return ModelSpec.from_dict(self._spec_fields())

    def _spec_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(ModelSpec)}

    def to_diff_dict(self) -> dict[str, Any]:
        """What ``save_pretrained`` writes: the config.json of a MODEL_DIR and nothing else."""
        return {
            "model_type": MODEL_TYPE,
            "architectures": ["EdgeQKVForCausalLM"],
            **self._spec_fields(),
            "provenance": self.provenance,
        }


class SharedLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer whose values *are* its keys: one tensor [B, G, T, D], stored once."""

    keys: Any

    @property
    def values(self) -> Any:
        return self.keys

    @values.setter
    def values(self, _: Any) -> None:
        """What the base class computes for the values is what it computed for the keys."""

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        return self.keys, self.keys


class EdgeQKVForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The decoder with ``generate()``. Its state_dict is a MODEL_DIR's, so ``save_pretrained`` writes one."""

    config_class = EdgeQKVConfig
    _input_embed_layer = "wte"

    def __init__(self, config: EdgeQKVConfig) -> None:
        super().__init__(config)
        spec = config.spec
        if not spec.is_causal:
            raise UnsupportedError(f"{spec.label} is not causal: it cannot generate text")
        decoder = Decoder(spec)
        for name, module in decoder.named_children():
            self.add_module(name, module)
        object.__setattr__(self, "decoder", decoder)  # the same modules, not registered again
        # Ids that no tokenizer has: their logits exist, but they must never be sampled.
        if spare := list(range(spec.used_tokens, spec.vocab_size)):
            self.generation_config.suppress_tokens = spare
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() then leaves the cache to forward, which knows its layout

    def new_cache(self) -> Cache:
        """One tensor per layer where key and value are the same numbers, else two."""
        if not self.decoder.spec.key_is_value:
            return DynamicCache()
        return Cache(layer_class_to_replicate=SharedLayer)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """input_ids [B, S] -> logits [B, S, vocab_size], or of the last ``logits_to_keep`` tokens.

        attention_mask [B, T + S] is 0 at padding, on either side. labels [B, S] are shifted here.

        Raises:
            RunError: more tokens than the model has positions for.
        """
        if past_key_values is None and use_cache is not False and not self.training:
            past_key_values = self.new_cache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        total = past + input_ids.shape[1]
        if position_ids is None:
            position_ids = _positions(attention_mask, past, total, input_ids.device)
        limit = self.config.max_position_embeddings
        if (last := int(position_ids.max())) >= limit:
            raise RunError(
                f"context overflow: {last + 1} tokens, the model has positions for {limit}; "
                "shorten the prompt or max_new_tokens"
            )
        bias = _bias(attention_mask, past, total, self.wte.weight)
        attend = self._attend(past_key_values, bias)
        states = self.decoder.hidden(input_ids, position_ids, attend)
        kept = states[:, -logits_to_keep:] if logits_to_keep else states
        logits = torch.nn.functional.linear(kept, self.decoder.head_weight)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return out if return_dict is not False else out.to_tuple()

    def _attend(self, cache: Cache | None, bias: Tensor) -> Attend:
        scale = self.decoder.spec.attention_scale

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if cache is not None:
                held = cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)
                k, v = (t.transpose(1, 2) for t in held)
            return scores_softmax_values(q, k, v, scale, bias)

        return attend


def _positions(mask: Tensor | None, past: int, total: int, device: torch.device) -> Tensor:
    """[1 or B, S]: a token's place among the tokens that are not padding."""
    if mask is None:
        return torch.arange(past, total, device=device)[None]
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]


def _bias(mask: Tensor | None, past: int, total: int, like: Tensor) -> Tensor:
    """[1 or B, 1, S, T + S]: the lowest finite number where a token may not look, else 0.

    Finite, because a row of padding may look nowhere and must not become NaN.
    """
    allowed = torch.ones(total - past, total, dtype=torch.bool, device=like.device).tril(past)
    allowed = allowed[None, None]
    if mask is not None:
        if mask.dim() != 2 or mask.shape[1] != total:
            raise RunError(
                f"attention_mask is {list(mask.shape)}; expected [batch, {total}]: cached and new tokens"
            )
        allowed = allowed & mask[:, None, None].bool()
    low = torch.finfo(like.dtype).min
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(
        ~allowed, low
    )


class EdgeQKVTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """tokenizer.json; GPT-2's end of text, where there is one, begins, ends and pads."""

    model_input_names = (
        "input_ids",
        "attention_mask",
    )  # else also token_type_ids: generate() refuses

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if END_OF_TEXT in self.get_vocab():
            for name in ("bos_token", "eos_token", "pad_token"):
                if getattr(self, name) is None:
                    setattr(self, name, END_OF_TEXT)


AutoConfig.register(MODEL_TYPE, EdgeQKVConfig, exist_ok=True)
AutoModelForCausalLM.register(EdgeQKVConfig, EdgeQKVForCausalLM, exist_ok=True)
AutoTokenizer.register(EdgeQKVConfig, fast_tokenizer_class=EdgeQKVTokenizer, exist_ok=True)
