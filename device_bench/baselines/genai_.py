"""Baseline ``genai``: optimum's export of the weights as a Hugging Face GPT-2, run by ONNX Runtime GenAI.

GenAI's own model builder knows no GPT-2, so this is its generic decoder: it hands the program last
step's keys and values and allocates those of the next.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_bench.baselines import optimum_
from edgeqkv.artifact import Artifact
from edgeqkv.errors import BundleError, MissingDependencyError, first_line
from edgeqkv.quiet import quiet
from edgeqkv.runner import check_tokens, shut
from edgeqkv.spec import ModelSpec

BACKEND = "genai"
RUNTIME = "onnxruntime_genai"  # what the bench imports before it times the load
CONFIG = "genai_config.json"
TOOLS = (*optimum_.TOOLS, "onnxruntime-genai")


def write(model_dir: Path, target: Path) -> Artifact:
    """MODEL_DIR -> GPT-2 -> ``main_export`` -> bundle ``target`` with GenAI's configuration."""
    return optimum_.export_gpt2(model_dir, target, BACKEND, TOOLS, _write_config)


def _write_config(folder: Path, spec: ModelSpec) -> None:
    end = spec.vocab_size - 1  # GenAI wants one; nothing here stops at it
    inputs = ("input_ids", "attention_mask", "position_ids")
    config = {
        "model": {
            "type": "llama",  # what GenAI calls a decoder with a key and a value per layer
            "vocab_size": spec.vocab_size,
            "context_length": spec.max_position_embeddings,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
            "decoder": {
                "filename": optimum_.ENTRY,
                "head_size": spec.head_dim,
                "hidden_size": spec.hidden_size,
                "num_attention_heads": spec.num_attention_heads,
                "num_key_value_heads": spec.num_key_value_heads,
                "num_hidden_layers": spec.num_hidden_layers,
                "inputs": {
                    **{name: name for name in inputs},
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"past_present_share_buffer": False},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def load(artifact: Artifact, directory: Path, *, threads: int, capacity: int) -> GenaiRunner:
    """Open the bundle with ``onnxruntime_genai.Model``.

    Raises:
        MissingDependencyError: no onnxruntime-genai. BundleError: it cannot load the folder.
    """
    with quiet():
        try:
            import onnxruntime_genai as genai
        except ImportError as e:
            raise MissingDependencyError(
                f"running a genai baseline needs {e.name}; pip install 'edgeqkv[genai]'"
            ) from None
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        asked = {
            "model": {"decoder": {"session_options": {**options, "log_severity_level": 4}}},
            "search": {"max_length": capacity},
        }
        try:
            config = genai.Config(str(directory))
            config.overlay(json.dumps(asked))
            model = genai.Model(config)
            generator = genai.Generator(model, genai.GeneratorParams(model))
        except Exception as e:  # GenAI raises RuntimeError, json's errors and its own
            raise BundleError(f"{directory} cannot be loaded by GenAI: {first_line(e)}") from None
    return GenaiRunner(artifact, generator, capacity)


class GenaiRunner:
    """See ``edgeqkv.runner.Runner``. One call per prompt."""

    engine = "onnxruntime-genai"
    interpreted = False

    def __init__(self, artifact: Artifact, generator: Any, capacity: int) -> None:
        self.artifact, self.capacity, self.position = artifact, capacity, 0
        self._generator = generator

    def reset(self) -> None:
        self._generator.rewind_to(0)
        self.position = 0

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        ids = np.asarray(ids)
        check_tokens(self, ids)
        self._generator.append_tokens(ids.astype(np.int32))
        self.position += ids.size
        last: NDArray[np.float32] = self._generator.get_logits()[0, -1].copy()
        return last

    def decode(self, token: int) -> NDArray[np.float32]:
        return self.prefill(np.array([token]))

    def cache_regions(self) -> None:
        """GenAI hands out copies of its keys and values, not where they are."""

    def close(self) -> None:
        shut(self, "_generator")
