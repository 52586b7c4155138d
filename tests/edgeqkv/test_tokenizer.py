import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from edgeqkv.errors import CheckpointError
from edgeqkv.tokenizer import byte_tokenizer, load_tokenizer, num_tokens

BYTE = byte_tokenizer()


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_byte_ids_are_the_bytes_and_come_back(text):
    ids = BYTE.encode(text).ids
    assert ids == list(text.encode("utf-8"))
    assert BYTE.decode(ids) == text


def test_byte_survives_what_normalisers_break():
    text = "\x00\r\n\t  a\u0301 é ﬁ 🧠‍🔬 日本 <|endoftext|>  "
    assert BYTE.decode(BYTE.encode(text).ids) == text
    assert num_tokens(BYTE) == 256
    assert set(BYTE.get_vocab()) == set(pre_tokenizers.ByteLevel.alphabet())


def test_byte_round_trips_through_tokenizer_json(tmp_path):
    (tmp_path / "tokenizer.json").write_text(load_tokenizer("byte").to_str(), "utf-8")
    for source in (tmp_path, str(tmp_path / "tokenizer.json")):
        assert load_tokenizer(source).encode("héé").ids == list("héé".encode())


def gpt2_files(folder):
    """A GPT-2 BPE of four merges in GPT-2's own files."""
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "hell")]
    tokens = [*chars, *("".join(m) for m in merges), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}), "utf-8")
    text = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)
    (folder / "merges.txt").write_text(text, "utf-8")
    return {t: i for i, t in enumerate(tokens)}


def test_gpt2_vocab_and_merges(tmp_path):
    ids = gpt2_files(tmp_path)
    for source in (tmp_path, tmp_path / "vocab.json"):
        tokenizer = load_tokenizer(source)
        encoded = tokenizer.encode("hello hello<|endoftext|>")
        assert encoded.ids == [
            ids["hell"],
            ids["o"],
            ids["\u0120hell"],
            ids["o"],
            ids["<|endoftext|>"],
        ]
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == (
            "hello hello<|endoftext|>"
        )
        assert num_tokens(tokenizer) == len(ids)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no tokenizer"),
        ({"tokenizer.json": "{"}, "not a readable tokenizer"),
        ({"tokenizer.json": "\x00\x01"}, "not a readable tokenizer"),
        ({"vocab.json": "{}"}, "needs merges.txt"),
        ({"vocab.json": "[", "merges.txt": ""}, "not a readable tokenizer"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "#version\na zz\n"}, "not a readable tokenizer"),
    ],
)
def test_damaged_tokenizers_are_one_line(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(CheckpointError, match=words) as e:
        load_tokenizer(tmp_path)
    assert "\n" not in str(e.value)


def test_a_missing_tokenizer_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist; allowed: byte"):
        load_tokenizer(tmp_path / "absent.json")


def test_tokenizer_needs_no_torch():
    code = "import sys, edgeqkv.tokenizer, edgeqkv.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
