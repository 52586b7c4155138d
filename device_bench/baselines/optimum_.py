"""Baseline ``optimum``: the weights as a Hugging Face GPT-2, exported and run by optimum-onnx."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_bench.baselines.bundle import finish
from device_bench.baselines.gpt2 import as_qkv, read_model_dir, write_hf_gpt2
from edgeqkv.artifact import Artifact
from edgeqkv.errors import BundleError, MissingDependencyError, first_line
from edgeqkv.files import new_folder
from edgeqkv.quiet import quiet
from edgeqkv.runner import check_tokens, shut
from edgeqkv.spec import ModelSpec

BACKEND, ENTRY = "optimum", "model.onnx"
RUNTIME = "optimum.onnxruntime.modeling_decoder"  # what the bench imports before it times the load
TOOLS = ("optimum", "optimum-onnx", "transformers", "torch")
_MISSING = "baseline optimum needs {}; pip install 'edgeqkv[optimum]'"


def write(model_dir: Path, target: Path) -> Artifact:
    """MODEL_DIR -> bundle ``target``."""
    return export_gpt2(model_dir, target, BACKEND, TOOLS, lambda folder, spec: None)


def export_gpt2(
    model_dir: Path,
    target: Path,
    backend: str,
    tools: tuple[str, ...],
    add: Callable[[Path, ModelSpec], None],
) -> Artifact:
    """MODEL_DIR -> GPT-2 -> ``main_export`` and what ``add`` writes beside it -> bundle ``target``.

    GPT-2 has as many key/value heads as query heads: grouped ones are repeated.
    """
    original, tensors = read_model_dir(model_dir)
    converted, tensors = as_qkv(original, tensors, grouped=False)
    with quiet():
        try:
            from optimum.exporters.onnx import main_export
        except ImportError as e:
            raise MissingDependencyError(_MISSING.format(e.name)) from None
        with new_folder(target) as folder, tempfile.TemporaryDirectory() as gpt2:
            write_hf_gpt2(Path(gpt2), converted, tensors)
            main_export(
                gpt2,
                folder,
                task="text-generation-with-past",
                do_validation=False,
                local_files_only=True,
            )
            add(Path(folder), converted)
            return finish(
                folder,
                model_dir,
                backend=backend,
                entry=ENTRY,
                converted=converted,
                original=original,
                cache_dtype="fp32",
                cache_mode="growing",
                formulation="optimum",
                capacities=[converted.max_position_embeddings],
                tools=tools,
                details={},
            )


def load(artifact: Artifact, directory: Path, *, threads: int, capacity: int) -> OptimumRunner:
    """Open the bundle with ``ORTModelForCausalLM``.

    Raises:
        MissingDependencyError: no optimum-onnx. BundleError: it cannot load the folder.
    """
    with quiet():
        try:
            import onnxruntime as ort
            from optimum.onnxruntime import ORTModelForCausalLM
        except ImportError as e:
            raise MissingDependencyError(_MISSING.format(e.name)) from None
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        try:
            model = ORTModelForCausalLM.from_pretrained(
                directory, local_files_only=True, session_options=options
            )
        except Exception as e:  # whatever transformers, optimum or onnxruntime raise
            raise BundleError(f"{directory} cannot be loaded by optimum: {first_line(e)}") from None
    return OptimumRunner(artifact, model, capacity)


class OptimumRunner:
    """See ``edgeqkv.runner.Runner``. One call per prompt: optimum does not cut it into chunks."""

    engine = "optimum-onnx"
    interpreted = False

    def __init__(self, artifact: Artifact, model: Any, capacity: int) -> None:
        self.artifact, self.capacity = artifact, capacity
        self._model = model
        self.reset()

    def reset(self) -> None:
        cache = self.artifact.cache
        self.position = 0
        empty = np.empty((1, cache.num_key_value_heads, 0, cache.head_dim), np.float32)
        self._past = ((empty, empty),) * cache.num_layers

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        ids = np.asarray(ids)
        check_tokens(self, ids)
        total = self.position + ids.size
        out = self._model(
            input_ids=ids.astype(np.int64)[None],
            attention_mask=np.ones((1, total), np.int64),
            position_ids=np.arange(self.position, total)[None],
            past_key_values=self._past,
        )
        self._past, self.position = out.past_key_values, total
        last: NDArray[np.float32] = out.logits[0, -1].copy()
        return last

    def decode(self, token: int) -> NDArray[np.float32]:
        return self.prefill(np.array([token], np.int64))

    def cache_regions(self) -> list[tuple[int, int]]:
        """The keys and values that the caller holds between two steps; a step has more beside them."""
        return [(t.ctypes.data, t.nbytes) for layer in self._past for t in layer]

    def close(self) -> None:
        shut(self, "_past", "_model")
