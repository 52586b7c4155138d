"""What the three formats have in common: reading their config, and taking tensors by a table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from edgeqkv.errors import CheckpointError, SpecError
from edgeqkv.presets import GPT2_TOKENS, GPT2_VOCAB
from edgeqkv.spec import ModelSpec

# What to do about a checkpoint that contradicts itself.
SAVE_AGAIN = "save it again with the code that trained it"
CORRECT = "correct the config and save the checkpoint again"
MASKS = re.compile(r"(.*\.)?attn\.(bias|masked_bias)")


@dataclasses.dataclass(frozen=True)
class Imported:
    """A checkpoint in our terms: names and shapes of ``spec.parameter_shapes()``.

    ``inferences``: every fact that was not recorded and had to be derived, one line each.
    """

    spec: ModelSpec
    state: dict[str, Tensor]
    source_format: str
    inferences: tuple[str, ...]


@dataclasses.dataclass
class Source:
    """A checkpoint being converted. ``state`` shrinks as tensors are taken; what is left is extra."""

    where: str
    config_name: str
    config: Mapping[str, Any]
    state: dict[str, Tensor]
    inferences: list[str] = dataclasses.field(default_factory=list)

    def get(self, key: str, kind: type) -> Any:
        """A value of the recorded config that must be there and of type ``kind``."""
        if key not in self.config:
            raise self.fail(f"{self.config_name} lacks {key!r}", CORRECT)
        value = self.config[key]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not (
            is_whole if kind is int else isinstance(value, kind) or (kind is float and is_whole)
        ):
            raise self.fail(
                f"{self.config_name} {key!r} is {value!r}, expected {kind.__name__}", CORRECT
            )
        return kind(value)

    def size(self, key: str) -> int:
        value: int = self.get(key, int)
        if value < 1:
            raise self.fail(f"{self.config_name} {key!r} is {value}, expected 1 or more", CORRECT)
        return value

    def tensor(self, name: str) -> Tensor:
        """A tensor that must be there."""
        if name not in self.state:
            raise self.fail(f"lacks tensor {name}")
        return self.state[name]

    def note(self, inference: str) -> None:
        self.inferences.append(inference)

    def fail(self, message: str, fix: str = SAVE_AGAIN) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}; {fix}")


def width_heads_dim(source: Source, heads_key: str) -> tuple[int, int, int]:
    """(hidden_size, heads, head_dim), the width divided evenly."""
    width, heads = source.size("n_embd"), source.size(heads_key)
    if width % heads:
        raise source.fail(f"n_embd {width} is not a multiple of {heads_key} {heads}", CORRECT)
    return width, heads, width // heads


def drop_masks(source: Source) -> None:
    """Causal masks were saved as 4-D buffers ``attn.bias``; a projection's bias is 1-D and stays."""
    masks = [
        name
        for name, tensor in source.state.items()
        if MASKS.fullmatch(name) and (tensor.dim() == 4 or name.endswith("masked_bias"))
    ]
    for name in masks:
        del source.state[name]
    if masks:
        source.note(f"{len(masks)} mask buffers dropped (h.*.attn.bias): not weights")


def tied(source: Source, flag: str, embedding: str) -> bool:
    """Whether the output head is the embedding; takes a redundant ``lm_head.weight`` out of the state.

    The recorded flag decides; a stored head that contradicts it is refused. Where the flag is not
    recorded, an absent or equal head means tied.
    """
    wte, head = source.tensor(embedding), source.state.get("lm_head.weight")
    same = head is None or (head.dtype == wte.dtype and torch.equal(head, wte))
    is_tied: bool = source.get(flag, bool) if flag in source.config else same
    if is_tied and head is not None and not same:
        raise source.fail(
            f"{flag} is true but lm_head.weight {list(head.shape)} is not equal to "
            f"{embedding} {list(wte.shape)}",
            f"set {flag} to false, or leave lm_head.weight away",
        )
    if flag not in source.config:
        found = "absent" if head is None else f"{'equal to' if same else 'unlike'} {embedding}"
        source.note(
            f"tie_word_embeddings {str(is_tied).lower()}: {flag} is not recorded and "
            f"lm_head.weight is {found}"
        )
    if is_tied:
        source.state.pop("lm_head.weight", None)
    elif head is not None and head.data_ptr() == wte.data_ptr():
        source.state["lm_head.weight"] = head.clone()  # two tensors from here on
    return is_tied


def has_bias(source: Source, key: str, witness: str) -> bool:
    """The recorded flag, else whether the ``witness`` tensor is there."""
    if key in source.config:
        flag: bool = source.get(key, bool)
        return flag
    present = witness in source.state
    source.note(
        f"bias {str(present).lower()}: {key} is not recorded and {witness} is "
        f"{'present' if present else 'absent'}"
    )
    return present


def used_tokens(source: Source, vocab_size: int) -> int | None:
    """GPT-2's padded vocabulary is known by its size; its spare ids must never be sampled."""
    if vocab_size != GPT2_VOCAB:
        return None
    source.note(
        f"num_used_tokens {GPT2_TOKENS}: a vocabulary of {GPT2_VOCAB} is GPT-2's, padded; "
        "import with --tokenizer to say otherwise"
    )
    return GPT2_TOKENS


def note_unknown(source: Source, known: Iterable[str]) -> None:
    """Config keys this reader does not know are said, not dropped in silence."""
    if unknown := sorted(str(k) for k in set(source.config) - set(known)):
        source.note(
            f"{source.config_name} keys that are not known and not used: {', '.join(unknown)}"
        )


def make_spec(source: Source, **fields: Any) -> ModelSpec:
    try:
        return ModelSpec(**fields)
    except SpecError as e:
        raise source.fail(str(e), CORRECT) from None


def take(
    source: Source, spec: ModelSpec, fused: Mapping[str, tuple[str, ...]], prefix: str = ""
) -> dict[str, Tensor]:
    """All tensors under our names; every other name is an error.

    ``fused``: their attention projection -> ours, in the order of its rows, e.g.
    ``{"c_attn": ("q_proj", "k_proj", "v_proj"), "c_proj": ("o_proj",)}``. Parts are views of what
    was read: nothing is copied.
    """
    parts: dict[str, list[str]] = {}
    shapes = spec.parameter_shapes()
    rename = _renamer(
        {ours: theirs for theirs, all_ours in fused.items() for ours in all_ours}, prefix
    )
    for ours in shapes:
        parts.setdefault(rename(ours), []).append(ours)
    taken: dict[str, Tensor] = {}
    for theirs, names in parts.items():
        expected = [sum(shapes[n][0] for n in names), *shapes[names[0]][1:]]
        if theirs not in source.state:
            raise source.fail(f"lacks tensor {theirs} {expected} of {spec.label}")
        tensor = source.state.pop(theirs)
        if list(tensor.shape) != expected:
            raise source.fail(
                f"{theirs} is {list(tensor.shape)}, expected {expected} for {spec.label}"
            )
        if not tensor.is_floating_point():
            raise source.fail(
                f"{theirs} is {tensor.dtype}, expected floating point", "save it as float32"
            )
        # The sum is finite exactly when every element is (an overflow of float64 aside).
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise source.fail(
                f"{theirs} holds NaN or infinite values",
                "give a checkpoint from before it diverged",
            )
        taken.update(zip(names, torch.split(tensor, [shapes[n][0] for n in names]), strict=True))
    if source.state:
        extra = min(source.state)
        raise source.fail(
            f"extra tensor {extra} {list(source.state[extra].shape)}, which {spec.label} does not have",
            "leave it away, or give the config of the model that has it",
        )
    return {name: taken[name] for name in shapes}


def _renamer(projections: Mapping[str, str], prefix: str) -> Callable[[str], str]:
    def rename(ours: str) -> str:
        block, attn, rest = ours.partition(".attn.")
        name, dot, kind = rest.partition(".")
        theirs = f"{block}{attn}{projections.get(name, name)}{dot}{kind}"
        return theirs if theirs.startswith("lm_head") else prefix + theirs

    return rename
