"""A text file as data: read, split by position, tokenize. No torch here."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgeqkv.errors import CheckpointError, TextError, UsageError
from edgeqkv.tokenizer import TOKENIZER, check_ids, codec_of

HELD_OUT = 0.05


def read_text(path: Path) -> str:
    """The whole of a UTF-8 text file.

    Raises:
        TextError: no file, empty, or not UTF-8.
    """
    if not path.is_file():
        found = "is no file" if path.exists() else "does not exist"
        raise TextError(f"text {path} {found}; give a UTF-8 text file")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise TextError(
            f"text {path} is not UTF-8: {e.reason} at byte {e.start}; save it as UTF-8"
        ) from None
    if not text:
        raise TextError(f"text {path} is empty; give a longer one")
    return text


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


def encode_file(
    path: Path, folder: Path, used: int, tokenizer: str | None = None, *, least: int = 2
) -> list[int]:
    """Token ids of a text file by ``tokenizer`` or, when None, the one in ``folder``.

    Raises:
        TextError: as :func:`read_text`, or it has fewer than ``least`` tokens.
        CheckpointError: no tokenizer, a damaged one, or one with ids that the model does not have.
    """
    text = read_text(path)
    if tokenizer is None and not (folder / TOKENIZER).is_file():
        raise CheckpointError(
            f"{folder} has no {TOKENIZER}, so text means nothing to it; give a tokenizer with "
            "--tokenizer byte|FILE|DIR (of `edgeqkv import` to keep it)"
        )
    ids: list[int] = codec_of(folder, tokenizer).encode(text, add_special_tokens=False).ids
    if len(ids) < least:
        raise TextError(f"text {path} has {len(ids)} tokens, needed: {least}; give a longer one")
    check_ids(ids, used, folder, tokenizer)
    return ids


def split(text: str) -> tuple[str, str]:
    """(training, held-out): the last 5 % of the characters, from the next line start on."""
    cut = int(len(text) * (1 - HELD_OUT))
    cut = text.find("\n", cut) + 1 or cut
    return text[:cut], text[cut:]


def padded(vocab_size: int) -> int:
    """Rows of the embedding: up to a multiple of 64, as the papers pad 50,257 to 50,304."""
    return -(-vocab_size // 64) * 64
