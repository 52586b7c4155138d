"""Baseline ``gguf``: the weights as llama.cpp's gpt2, run by llama-cpp-python.

llama.cpp keeps keys and values in fp16 and reserves them for the whole context at load. Its gpt2 has
one GELU, the tanh approximation, so that logits of a model with the exact one differ a little; what
is measured, memory and time, does not.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_bench import malloc_chunks
from device_bench.baselines.bundle import finish
from device_bench.baselines.gpt2 import Tensors, as_qkv, fused, read_model_dir
from device_bench.memory import resident_bytes
from edgeqkv.artifact import Artifact, inside
from edgeqkv.errors import BundleError, MissingDependencyError, UnsupportedError
from edgeqkv.files import new_folder
from edgeqkv.quant import uniform
from edgeqkv.quiet import quiet
from edgeqkv.runner import check_tokens, shut
from edgeqkv.spec import ModelSpec

BACKEND, ENTRY = "gguf", "model.gguf"
RUNTIME = "llama_cpp"  # what the bench imports before it times the load
# What a matrix is stored as -> our name of the same bits. Blocks of 32 share an fp16 scale; positions
# stay fp16 under the integers, as ours do.
BLOCK = 32
FORMATS = {"f32": "fp32", "q8_0": "int8", "q4_0": "int4"}
BATCH = 512  # llama.cpp's default: tokens per call of the program
CONTEXT_STEP = 256  # llama.cpp rounds a context up to a multiple of it
# Our name of a tensor of one layer -> GGUF's; weights are (out, in) in both.
_LAYER = {
    "ln_1": "attn_norm",
    "attn.o_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_TOP = {
    "wte.weight": "token_embd.weight",
    "wpe.weight": "position_embd.weight",
    "ln_f.weight": "output_norm.weight",
    "ln_f.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}


@dataclasses.dataclass(frozen=True)
class Declared:
    bytes_per_token: int


def write(model_dir: Path, target: Path, stored: str = "f32") -> Artifact:
    """MODEL_DIR -> GGUF of matrices as ``stored``, without a tokenizer -> bundle ``target``.

    Grouped key/value heads stay grouped: llama.cpp reads them as they are.

    Raises:
        UnsupportedError: matrices that blocks of 32 do not divide.
    """
    original, tensors = read_model_dir(model_dir)
    converted, tensors = as_qkv(original, tensors, grouped=True)
    if stored != "f32" and (converted.hidden_size % BLOCK or converted.intermediate_size % BLOCK):
        raise UnsupportedError(
            f"{model_dir}: {stored} needs a hidden_size and an intermediate_size in blocks of {BLOCK}, "
            f"found {converted.hidden_size} and {converted.intermediate_size}; use gguf"
        )
    with new_folder(target) as folder:
        write_gguf(folder / ENTRY, converted, tensors, stored, name=model_dir.resolve().name)
        exact = converted.hidden_act == "gelu"
        return finish(
            folder,
            model_dir,
            backend=BACKEND,
            entry=ENTRY,
            converted=converted,
            original=original,
            cache_dtype="fp16",
            cache_mode="static",
            formulation="llama.cpp",
            capacities=_capacities(converted.max_position_embeddings),
            tools=("gguf",),
            details={"hidden_act": "tanh approximation"} if exact else {},
            recipe=uniform(FORMATS[stored], None if stored == "f32" else BLOCK),
        )


def _capacities(positions: int) -> list[int]:
    """Up to four contexts evenly apart, of which a slope of the memory reserved at load is made."""
    steps = positions // CONTEXT_STEP
    even = {CONTEXT_STEP * -(-steps * i // 4) for i in range(1, 5)} if steps else set()
    return sorted(even | {positions})


def write_gguf(path: Path, spec: ModelSpec, tensors: Tensors, stored: str, *, name: str) -> None:
    """``tensors`` of :func:`as_qkv`; rounded by gguf's own rules where ``stored`` is integer.

    Raises:
        MissingDependencyError: no gguf.
    """
    try:
        from gguf import GGMLQuantizationType, GGUFWriter, quants
    except ImportError:
        raise MissingDependencyError(
            "baseline gguf needs gguf; pip install 'edgeqkv[gguf]'"
        ) from None
    writer = GGUFWriter(path, "gpt2")
    writer.add_name(name)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_key_value_heads)
    writer.add_layer_norm_eps(spec.layer_norm_eps)
    writer.add_tokenizer_model("none")
    for key, tensor in gguf_tensors(spec, tensors).items():
        how = stored if tensor.ndim == 2 else "f32"
        if key == _TOP["wpe.weight"] and stored != "f32":
            how = "f16"
        kind = GGMLQuantizationType[how.upper()]
        writer.add_tensor(key, quants.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def gguf_tensors(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors under llama.cpp's names, q, k and v of a layer as one."""
    out = {theirs: tensors[ours] for ours, theirs in _TOP.items() if ours in tensors}
    for i in range(spec.num_hidden_layers):
        for kind in ("weight", "bias"):
            out[f"blk.{i}.attn_qkv.{kind}"] = fused(tensors, i, kind)
            for ours, theirs in _LAYER.items():
                out[f"blk.{i}.{theirs}.{kind}"] = tensors[f"h.{i}.{ours}.{kind}"]
    return out


def declared(artifact: Artifact, directory: Path) -> Declared:
    """Bytes of cache per token that the file's own metadata lead llama.cpp to reserve, in fp16."""
    from gguf import GGUFReader

    reader = GGUFReader(inside(directory, artifact.entry))

    def size(key: str) -> int:
        return int(reader.fields[f"gpt2.{key}"].contents())

    heads = size("attention.head_count")
    dim = size("embedding_length") // heads
    return Declared(size("block_count") * 2 * size("attention.head_count_kv") * dim * 2)


def load(artifact: Artifact, directory: Path, *, threads: int, capacity: int) -> GgufRunner:
    """Open the file with ``llama_cpp.Llama``; ``capacity`` tokens of cache are reserved now.

    Raises:
        MissingDependencyError: no llama-cpp-python. BundleError: it cannot load the file.
    """
    path = inside(directory, artifact.entry)
    with quiet():
        try:
            import llama_cpp
        except (ImportError, OSError, RuntimeError) as e:  # the last two: its library does not load
            raise MissingDependencyError(
                f"running a gguf baseline needs llama-cpp-python ({e}); pip install 'edgeqkv[gguf]'"
            ) from None
        cells = -(-capacity // CONTEXT_STEP) * CONTEXT_STEP
        cache = artifact.cache.bytes_per_token * cells  # one buffer for all layers, zeroed at load
        try:
            with malloc_chunks.fresh(cache) as blocks:
                model = llama_cpp.Llama(
                    str(path),
                    n_ctx=capacity,
                    n_batch=BATCH,
                    n_threads=threads,
                    n_threads_batch=threads,
                    verbose=False,
                )
        except (ValueError, RuntimeError) as e:
            raise BundleError(f"{path} cannot be loaded by llama.cpp: {e}; run again") from None
    runner = GgufRunner(artifact, model, llama_cpp.llama_get_logits_ith, capacity)
    held = [block for block in blocks if (resident_bytes([(block, cache)]) or 0) >= 0.99 * cache]
    runner.regions = [(held[0], cache)] if len(held) == 1 else None
    return runner


class GgufRunner:
    """See ``edgeqkv.runner.Runner``."""

    engine = "llama.cpp"
    interpreted = False

    def __init__(self, artifact: Artifact, model: Any, get_logits: Any, capacity: int) -> None:
        self.artifact, self.capacity, self.position = artifact, capacity, 0
        self._model, self._get_logits = model, get_logits
        self.regions: list[tuple[int, int]] | None = None

    def reset(self) -> None:
        self.position = 0
        self._model.reset()

    def prefill(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        ids = np.asarray(ids)
        check_tokens(self, ids)
        self._model.eval(ids.tolist())
        self.position += ids.size
        found = self._get_logits(self._model.ctx, -1)
        return np.ctypeslib.as_array(found, (self.artifact.model.vocab_size,)).copy()

    def decode(self, token: int) -> NDArray[np.float32]:
        return self.prefill(np.array([token]))

    def cache_regions(self) -> list[tuple[int, int]] | None:
        """llama.cpp does not say where its cache is: told by its size, see malloc_chunks."""
        return self.regions

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
        shut(self, "_model")
