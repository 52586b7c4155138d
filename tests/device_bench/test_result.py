import dataclasses
import json
from pathlib import Path

import pytest

import device_bench
from device_bench.result import (
    BenchResult,
    append_result,
    cut_partial_line,
    read_results,
    schema,
)
from device_bench.slopes import TOLERANCE, contradiction
from edgeqkv.errors import SpecError
from tests.device_bench.results import result

PUBLISHED = Path(device_bench.__file__).with_name("result.schema.json")


@pytest.fixture
def line(tmp_path):
    return result(tmp_path / "bundle")


def _as_json(line):
    return json.loads(json.dumps(line.to_dict()))


def test_round_trip(line):
    assert BenchResult.from_dict(_as_json(line)) == line


def test_lines_of_version_1_still_load():
    """Written by the code before version 2."""
    results, warning = read_results(Path(__file__).parents[1] / "golden" / "result_v1.jsonl")
    assert warning is None
    assert [r.workload.label for r in results] == ["pp128", "tg4"]
    for r in results:
        assert (r.schema_version, r.workload.process, r.conditions.attempts) == (1, 0, 1)
        assert r.conditions.read_bandwidth is r.artifact.step_weight_bytes is r.unstable is None
        assert BenchResult.from_dict(_as_json(r)) == r


def test_the_published_schema_is_the_dataclass_s():
    assert json.loads(PUBLISHED.read_text()) == schema(), "run: python -m device_bench.result"


def test_lines_validate_against_the_published_schema(line):
    jsonschema = pytest.importorskip("jsonschema")
    published = json.loads(PUBLISHED.read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    validator = jsonschema.Draft202012Validator(published)
    validator.validate(_as_json(line))
    failed = dataclasses.replace(line, status="failed", reason="x", samples=None, memory=None)
    validator.validate(_as_json(failed))
    assert not validator.is_valid(_as_json(line) | {"surprise": 1})


def _paths(data, where=()):
    """Every key of nested objects."""
    for key, value in data.items():
        yield (*where, key)
        if isinstance(value, dict):
            yield from _paths(value, (*where, key))


def test_unknown_keys_are_refused_at_every_level(line):
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema())
    free = {("artifact", "tools"), ("artifact", "details")}
    objects = {p[:-1] for p in _paths(_as_json(line))} - free
    assert len(objects) >= 10
    for where in objects:
        data = _as_json(line)
        target = data
        for key in where:
            target = target[key]
        target["surprise"] = 1
        with pytest.raises(SpecError, match="unknown key 'surprise'"):
            BenchResult.from_dict(data)
        assert not validator.is_valid(data)


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("status",), "good", "allowed: ok, invalid, failed"),
        (("workload", "n_gen"), "32", "result.workload.n_gen is '32'; it must be integer"),
        (("workload", "n_gen"), True, "must be integer"),
        (("samples", "repetitions"), [[1.5]], r"repetitions\[0\]\[0\] is 1.5"),
        (("cache", "bytes_per_token", "measured_cache"), "x", "must be number"),
        (("cache", "bytes_per_token", "ci95", "measured_cache"), [1.0], "must be array of 2"),
        (("model", "spec", "head_dim"), 0, "head_dim is 0"),
        (("artifact", "tools"), {"a": 1}, "artifact.tools.a is 1; it must be string"),
        (("schema_version",), 99, "schema_version is 99"),
    ],
)
def test_wrong_values_are_refused_by_name(line, where, value, words):
    data = _as_json(line)
    target = data
    for key in where[:-1]:
        target = target[key]
    target[where[-1]] = value
    with pytest.raises(SpecError, match=words):
        BenchResult.from_dict(data)


def test_a_missing_key_is_refused(line):
    data = _as_json(line)
    del data["cache"]["layout"]
    with pytest.raises(SpecError, match="lacks 'layout'"):
        BenchResult.from_dict(data)


def test_a_line_cut_short_is_reported_skipped_and_repaired(line, tmp_path):
    path = tmp_path / "r.jsonl"
    append_result(path, line)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:200])
    results, warning = read_results(path)
    assert results == [line]
    assert "line 2 was cut short" in warning
    cut_partial_line(path)
    append_result(path, line)
    assert read_results(path) == ([line, line], None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no results"),
        (b"backend,tok/s\n1,2\n", "line 1 is not JSON"),
        (b"\xff\xfe\x00", "line 1 is not JSON"),
        (b'{"a": 1}\n', "not a bench result: schema_version is None"),
        (b"[1, 2]\n", "not a bench result"),
    ],
)
def test_other_files_are_refused(tmp_path, content, words):
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=words):
        read_results(path)


def test_damage_in_the_middle_is_no_cut_line(line, tmp_path):
    path = tmp_path / "r.jsonl"
    append_result(path, line)
    good = path.read_bytes()
    path.write_bytes(good + b"{broken\n" + good)
    with pytest.raises(SpecError, match="line 2 is not JSON"):
        read_results(path)


@pytest.mark.parametrize(
    ("declared", "measured", "words"),
    [
        (8192, 8192.0, None),
        (None, None, None),
        (8192, 8192 * (1 + 0.99 * TOLERANCE), None),
        (8192, 8192 * 1.031, "measured in the cache, 8192 formula"),
        (8192, 8192 * 0.96, "measured in the cache"),
        (16384, 8192.0, "16384 declared by the artifact, 8192 formula"),
        (16384, None, "16384 declared"),
        (8192, 0.0, "0 measured in the cache"),
    ],
)
def test_the_three_figures_must_agree(line, declared, measured, words):
    figures = dataclasses.replace(
        line.cache.bytes_per_token, declared=declared, measured_cache=measured
    )
    found = contradiction(figures)
    assert (found is None) == (words is None)
    assert words is None or words in found
