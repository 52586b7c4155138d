import json
import re

import pytest

from edgeqkv.errors import UsageError
from edgeqkv.estimate import estimate, parse_bytes
from edgeqkv.presets import PRESETS


def rows(preset, **options):
    found = estimate(PRESETS[preset], [2048, 32768], **options)
    return {(r.variant, r.layout): r for r in found}


def test_the_papers_table_at_32768_tokens():
    """arXiv 2606.04032, 1.2B in bf16: 5632 MiB for QKV, 88 MiB for Q-MQA, exactly 64 times less."""
    found = rows("1.2b-qkv", groups=8)
    mib = {k: r.cache_bytes[32768] / 2**20 for k, r in found.items()}
    assert mib["QKV", "separate"] == 5632
    assert mib["Q-K=V", "shared"] == 2816
    assert mib["GQA-8", "separate"] == 1408
    assert mib["Q-GQA-8", "shared"] == 704
    assert mib["MQA", "separate"] == 176
    assert mib["Q-MQA", "shared"] == 88
    assert found["Q-MQA", "shared"].ratio == 64


@pytest.mark.parametrize("name", [n for n in PRESETS if n[:4] in ("300m", "1.2b")])
def test_every_preset_is_a_row_of_its_shape(name):
    spec = PRESETS[name]
    groups = {"300m": 4, "1.2b": 8}[name[:4]]
    layout = "shared" if spec.key_is_value else "separate"
    row = rows(name, groups=groups)[spec.label, layout]
    assert row.parameters == spec.num_parameters()


def test_the_context_that_fits_really_fits():
    budget = parse_bytes("700MiB")
    for r in rows("300m-qkv", budget_bytes=budget, weights="fp16").values():
        used = r.weight_bytes + r.max_context * r.bytes_per_token
        assert used <= budget < used + r.bytes_per_token
    tight = rows("300m-qkv", budget_bytes=1000)
    assert {r.max_context for r in tight.values()} == {0}


@pytest.mark.parametrize(
    ("text", "value"), [("1024", 1024), ("512MiB", 2**29), ("1.5 GB", 15 * 10**8), ("2kib", 2048)]
)
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "many", "1 parsec", "-5MB", "MiB"])
def test_bad_sizes(text):
    with pytest.raises(UsageError, match="examples: 512MiB"):
        parse_bytes(text)


def test_command(cli):
    out = cli("estimate", "--preset", "1.2b-q-mqa", "--budget", "4GiB", "--json", check=0).stdout
    assert {r["variant"]: r["asked"] for r in json.loads(out)}.items() >= {
        "Q-MQA": True,
        "QKV": False,
    }.items()
    table = cli("estimate", "--preset", "1.2b-q-mqa", "--budget", "4GiB", check=0).stdout
    assert max(map(len, table.splitlines())) <= 100
    assert "64x" in table
    assert "88.0 MiB" in table
    assert re.findall(r"^(\S+)\*", table, re.M) == ["Q-MQA", "Q-MQA"]  # shared and separate
    assert "* Q-MQA: the variant of 1.2b-q-mqa" in table
    assert "tokens in 4GiB: " in table


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--preset", "9b"],
        ["--preset", "300m-qkv", "--context", "x"],
        ["--preset", "300m-qkv", "--context", "0"],
        ["--preset", "300m-qkv", "--weights", "int2"],
        ["--preset", "300m-qkv", "--groups", "3"],
        ["--preset", "300m-qkv", "--cache-dtype", "fp8"],
        ["--preset", "300m-qkv", "--budget", "big"],
    ],
)
def test_bad_requests_are_one_line(cli, arguments):
    result = cli("estimate", *arguments)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
