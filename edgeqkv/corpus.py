"""A text file as data: read, split by position, tokenize. No torch here."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgeqkv.errors import UsageError
from edgeqkv.tokenizer import TOKENIZER, load_tokenizer

HELD_OUT = 0.05


def read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not UTF-8 text: {e.reason} at byte {e.start}") from None


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE (GPT-2's pre-tokenizer) of at most ``vocab_size`` tokens; any text encodes."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet):
        raise UsageError(f"--vocab-size is {vocab_size}; at least the {len(alphabet)} bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def encode_file(path: Path, folder: Path, used: int, tokenizer: str | None = None) -> list[int]:
    """Token ids of a text file by ``tokenizer`` or, when None, the one in ``folder``.

    Raises:
        UsageError: no such text, no tokenizer, or one with ids that the model does not have.
        CheckpointError: the tokenizer is damaged.
    """
    if not path.is_file():
        raise UsageError(f"text {path} does not exist or is no file")
    if tokenizer is None and not (folder / TOKENIZER).is_file():
        raise UsageError(
            f"{folder} has no {TOKENIZER}, so text means nothing to it; give a tokenizer with "
            "--tokenizer byte|FILE|DIR (of `edgeqkv import` to keep it)"
        )
    codec = load_tokenizer(tokenizer or str(folder / TOKENIZER))
    ids: list[int] = codec.encode(read_text(path), add_special_tokens=False).ids
    if ids and max(ids) >= used:
        raise UsageError(
            f"the tokenizer gives id {max(ids)}, the model has {used} tokens; they do not belong "
            "together"
        )
    return ids


def split(text: str) -> tuple[str, str]:
    """(training, held-out): the last 5 % of the characters, from the next line start on."""
    cut = int(len(text) * (1 - HELD_OUT))
    cut = text.find("\n", cut) + 1 or cut
    return text[:cut], text[cut:]


def padded(vocab_size: int) -> int:
    """Rows of the embedding: up to a multiple of 64, as the papers pad 50,257 to 50,304."""
    return -(-vocab_size // 64) * 64
