"""Tokenizers: a file or folder, or ``byte``, as a ``tokenizers.Tokenizer``. No torch here.

``byte`` has 256 ids, one per byte: ``ids == list(text.encode("utf-8"))``, so any text survives a
round trip and any small corpus can be trained on without a vocabulary.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgeqkv.console import note
from edgeqkv.errors import CheckpointError

BYTE = "byte"
TOKENIZER = "tokenizer.json"
VOCAB, MERGES = "vocab.json", "merges.txt"
END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """``byte``, a ``tokenizer.json``, or a folder with one or with GPT-2's ``vocab.json`` and ``merges.txt``.

    Raises:
        CheckpointError: nothing there that is a tokenizer, or it is damaged.
    """
    if source == BYTE:
        return byte_tokenizer()
    path = Path(source)
    if path.is_dir():
        found = [n for n in (TOKENIZER, VOCAB) if (path / n).is_file()]
        if not found:
            raise CheckpointError(
                f"{path} has no tokenizer: expected {TOKENIZER}, or {VOCAB} with {MERGES}; "
                "give one with `edgeqkv import SRC -o MODEL_DIR --tokenizer byte|FILE|DIR`"
            )
        path = path / found[0]
    if not path.is_file():
        raise CheckpointError(
            f"tokenizer {str(path)!r} does not exist; allowed: byte, a {TOKENIZER}, or a folder with "
            f"{TOKENIZER} or {VOCAB} and {MERGES}"
        )
    if path.name == VOCAB and not path.with_name(MERGES).is_file():
        raise CheckpointError(f"{path} needs {MERGES} beside it, which is missing; copy it there")
    try:
        return _gpt2(path) if path.name == VOCAB else Tokenizer.from_buffer(path.read_bytes())
    except Exception as e:  # the library raises bare Exception for whatever it cannot parse
        reason = " ".join(str(e).split())[:200]
        raise CheckpointError(
            f"{path} is not a readable tokenizer: {reason}; give the tokenizer.json of a model, or byte"
        ) from None


def has_tokenizer(folder: Path) -> bool:
    """Whether :func:`load_tokenizer` has something to read in ``folder``."""
    return any((folder / name).is_file() for name in (TOKENIZER, VOCAB))


def codec_of(folder: Path, tokenizer: str | None) -> Tokenizer:
    """The tokenizer that a ``--tokenizer`` names, with a warning where ``folder``'s own is another;
    that one when None."""
    if tokenizer is None:
        return load_tokenizer(folder / TOKENIZER)
    codec = load_tokenizer(tokenizer)
    _note_another(folder, f"--tokenizer {tokenizer}", codec)
    return codec


def check_ids(ids: Sequence[int], used: int, folder: Path, tokenizer: str | None) -> None:
    """Raises CheckpointError for an id of :func:`codec_of`'s that is none of the model's ``used``."""
    if max(ids) >= used:
        raise CheckpointError(
            f"tokenizer {tokenizer or folder / TOKENIZER} gives id {max(ids)}, {folder} has {used} "
            "tokens; give the tokenizer that the model was trained with"
        )


def _note_another(folder: Path, asked: str, codec: Tokenizer) -> None:
    """A warning on stderr where ``folder`` has a tokenizer and ``codec``, of ``asked``, is another."""
    own = folder / TOKENIZER
    if not own.is_file():
        return
    with contextlib.suppress(CheckpointError):  # one that cannot be read is another
        if load_tokenizer(own).to_str() == codec.to_str():
            return
    note(f"warning: {folder} has its own {TOKENIZER}, {asked} is another: ids may mean other text")


def num_tokens(tokenizer: Tokenizer) -> int:
    """Ids that the tokenizer can emit lie in [0, n); gaps in its vocabulary count."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def byte_tokenizer() -> Tokenizer:
    """256 tokens; the id is the byte."""
    return _byte_level({char: byte for byte, char in enumerate(_byte_chars())}, [])


def _gpt2(vocab: Path) -> Tokenizer:
    ids, merges = models.BPE.read_file(str(vocab), str(vocab.with_name(MERGES)))
    tokenizer = _byte_level(ids, merges, use_regex=True)
    if END_OF_TEXT in ids:
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer


def _byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], *, use_regex: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_chars() -> list[str]:
    """GPT-2's printable stand-in for each byte 0..255: itself, or the next free code point from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(stand_ins)) for b in range(256)]
