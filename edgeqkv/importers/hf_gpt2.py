"""Hugging Face GPT-2 folders: ``config.json`` beside ``model.safetensors`` or ``pytorch_model.bin``.

Its linear layers are ``Conv1D``, whose weights are (in, out). No transformers needed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from edgeqkv.config import CONFIG, MODEL_TYPE
from edgeqkv.errors import CheckpointError
from edgeqkv.importers.convert import (
    Imported,
    Source,
    drop_masks,
    make_spec,
    note_unknown,
    take,
    tied,
    used_tokens,
    width_heads_dim,
)
from edgeqkv.importers.read import open_checkpoint, weights

NAME = "Hugging Face GPT-2"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"

_PREFIX = "transformer."  # absent where the base model was saved, as in the original gpt2
_CONV1D = re.compile(r"(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
_FUSED = {"c_attn": ("q_proj", "k_proj", "v_proj"), "c_proj": ("o_proj",)}
_ACTS = {"gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu": "gelu"}
_MUST_BE_OFF = (
    "reorder_and_upcast_attn",
    "scale_attn_by_inverse_layer_idx",
    "add_cross_attention",
)
_USED = (
    *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "model_type"),
    *("activation_function", "layer_norm_epsilon", "scale_attn_weights", "tie_word_embeddings"),
)
# Said by the config, without a part in what the language model computes.
_NOT_NEEDED = (
    *("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "n_ctx"),
    *(
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "initializer_range",
        "use_cache",
        "task_specific_params",
    ),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout"),
    *(
        "summary_proj_to_labels",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "gradient_checkpointing",
    ),
)


def read(folder: Path) -> Imported:
    """The model in ``folder``, its weights memory-mapped where the file allows it.

    Raises:
        CheckpointError: no GPT-2, sharded or damaged weights, or a flag this decoder has not.
    """
    config = _config(folder)
    source = Source(str(folder), CONFIG, config, _weights(folder))
    _refuse_flags(source)
    drop_masks(source)
    width, heads, dim = width_heads_dim(source, "n_head")
    vocab_size = source.size("vocab_size")
    prefix = _PREFIX if f"{_PREFIX}wte.weight" in source.state else ""
    scaled = source.get("scale_attn_weights", bool) if "scale_attn_weights" in config else True
    spec = make_spec(
        source,
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=source.size("n_layer"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=dim,
        intermediate_size=4 * width if config.get("n_inner") is None else source.size("n_inner"),
        max_position_embeddings=source.size("n_positions"),
        attention_scale=1 / math.sqrt(dim) if scaled else 1.0,
        hidden_act=_hidden_act(source),
        layer_norm_eps=source.get("layer_norm_epsilon", float),
        tie_word_embeddings=tied(source, "tie_word_embeddings", f"{prefix}wte.weight"),
        num_used_tokens=used_tokens(source, vocab_size),
    )
    note_unknown(source, (*_USED, *_MUST_BE_OFF, *_NOT_NEEDED))
    for name, tensor in source.state.items():
        if _CONV1D.search(name) and tensor.dim() == 2:
            source.state[name] = tensor.T
    state = take(source, spec, _FUSED, prefix)
    return Imported(spec, state, NAME, tuple(source.inferences))


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is a folder without {CONFIG}; give a Hugging Face GPT-2 folder, or the "
            "checkpoint file (.pt or .pth)"
        )
    try:
        config = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}; download it again") from None
    found = config.get("model_type") if isinstance(config, dict) else None
    if found == MODEL_TYPE:
        raise CheckpointError(f"{folder} is a MODEL_DIR already; give it to `edgeqkv export`")
    if found != "gpt2":
        raise CheckpointError(
            f"{path}: model_type is {found!r}, allowed: 'gpt2'; no other architecture is supported"
        )
    return dict(config)


def _weights(folder: Path) -> dict[str, Tensor]:
    for name in (SAFETENSORS, PICKLED):
        path = folder / name
        if path.is_file():
            found = _mapped(path) if name == SAFETENSORS else open_checkpoint(path)
            return weights(found, str(path))
        if path.with_name(f"{name}.index.json").is_file():
            raise CheckpointError(
                f"{folder} holds its weights in shards; only one file is read. Save it again with "
                "save_pretrained(DIR, max_shard_size='100GB')"
            )
    raise CheckpointError(
        f"{folder} has no weights: expected {SAFETENSORS} or {PICKLED}; download one into it"
    )


def _mapped(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise CheckpointError(
            f"{path} is damaged or cut short: {e}; copy or download it again"
        ) from None


def _refuse_flags(source: Source) -> None:
    for key in _MUST_BE_OFF:
        if source.config.get(key):
            raise source.fail(
                f"{CONFIG} {key!r} is {source.config[key]!r}, allowed: false",
                "a model trained otherwise is not supported",
            )


def _hidden_act(source: Source) -> str:
    name = source.get("activation_function", str)
    if name not in _ACTS:
        raise source.fail(
            f"{CONFIG} 'activation_function' is {name!r}, allowed: {', '.join(_ACTS)}",
            "a model trained with another is not supported",
        )
    return _ACTS[name]
