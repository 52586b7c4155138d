"""compare against a baseline: which rows meet, what a regression is, what may not be mixed."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from device_bench import compare
from device_bench.commands.compare import run
from device_bench.figures import fold
from device_bench.result import append_result
from edgeqkv.errors import UsageError
from tests.device_bench.results import result


def sweep(folder, *, slower=1.0, processes=3, **changes):
    """Decode lines of both layouts; every process a little slower than the one before."""
    made = []
    for layout in ("shared", "separate"):
        line = result(folder / layout, layout=layout, gen=4, **changes)
        for process in range(processes):
            step = round(1_000_000 * slower * (1 + 0.005 * process))
            stamps = tuple(500_000 + i * step for i in range(4))
            made.append(
                dataclasses.replace(
                    line,
                    workload=dataclasses.replace(line.workload, process=process),
                    samples=dataclasses.replace(line.samples, repetitions=(stamps, stamps)),
                )
            )
    return made


def write(path, lines):
    for line in lines:
        append_result(path, line)
    return path


@pytest.fixture
def before(tmp_path):
    return write(tmp_path / "before.jsonl", sweep(tmp_path / "b"))


def after(tmp_path, **how):
    return write(tmp_path / "after.jsonl", sweep(tmp_path / "b", **how))


@pytest.mark.parametrize("name", ["separate", "SEPARATE q-gqa-4", "self-test separate"])
def test_a_bundle_is_named_by_some_of_its_words(tmp_path, name):
    found = compare.against_bundle(fold(sweep(tmp_path)), name)
    assert {c.who for c in found} == {"self-test Q-GQA-4 shared"}
    by_figure = {c.figure: c for c in found}
    assert by_figure["cache B/token"].ratio == 0.5
    assert by_figure["cache B/token"].ci95 == (0.5, 0.5)
    assert by_figure["cache B/token"].worse == -0.5
    speed = by_figure["decode tok/s"]
    assert speed.ratio == pytest.approx(1)
    assert speed.ci95[0] < 1 < speed.ci95[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [("coreml", "names no row"), ("", "names no row"), ("self-test", "names 2 rows")],
)
def test_a_name_for_no_or_several_bundles_is_refused(tmp_path, name, words):
    with pytest.raises(UsageError, match=words):
        compare.against_bundle(fold(sweep(tmp_path)), name)


@pytest.mark.parametrize(
    ("slower", "limit", "regressed"),
    [(1.2, 0.05, True), (1.2, 0.19, False), (1.04, 0.05, False), (0.8, 0.05, False)],
)
def test_a_regression_is_beyond_the_limit_with_its_whole_interval(
    tmp_path, slower, limit, regressed
):
    old, new = (fold(sweep(tmp_path / "b", slower=s)) for s in (1.0, slower))
    found = [c for c in compare.against_file(new, old) if c.figure == "decode tok/s"]
    assert len(found) == 2
    for c in found:
        assert c.worse == pytest.approx(slower - 1, abs=1e-3)
        assert c.worse_ci95[0] < c.worse < c.worse_ci95[1]
        assert c.regressed(limit) is regressed


def test_one_process_cannot_judge_time_but_bytes_are_exact(tmp_path):
    old, new = (fold(sweep(tmp_path / "b", slower=s, processes=1)) for s in (1.0, 2.0))
    found = {c.figure: c.regressed(0.05) for c in compare.against_file(new, old)}
    assert found["decode tok/s"] is None
    assert found["cache B/token"] is found["file bytes"] is False


def test_rows_without_their_like_in_the_baseline_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no row of the results is in the baseline"):
        compare.against_file(fold(sweep(tmp_path)), fold(sweep(tmp_path, depth=512)))


def test_exit_6_says_what_regressed(cli, tmp_path, before):
    slow = after(tmp_path, slower=1.3)
    flags = ("--baseline", before, "--fail-on-regression", "5%")
    done = cli("compare", before, slow, *flags, check=6)
    assert done.stderr.count("regression: ") == 2
    assert "tg4, 1 thread decode tok/s: +30.0% worse than" in done.stderr
    assert "REGRESSION" in done.stdout
    cli("compare", slow, *flags[:3], "40%", check=0)


def test_no_worse_is_exit_0_and_unjudged_is_said(cli, tmp_path, before):
    flags = ("--baseline", before, "--fail-on-regression", "5")
    done = cli("compare", after(tmp_path, slower=1.3, processes=1), *flags, check=0)
    assert "worse by more than the limit, not judged for want of an interval: decode" in done.stderr
    assert "decode tok/s" in done.stderr


def test_devices_and_conditions_are_not_mixed_in_silence(cli, tmp_path, before):
    lines = sweep(tmp_path / "b")
    other = [
        dataclasses.replace(
            r,
            device=dataclasses.replace(r.device, cpu_model="Cortex-A76"),
            conditions=dataclasses.replace(r.conditions, governor="powersave", power="battery"),
        )
        for r in lines
    ]
    phone = write(tmp_path / "phone.jsonl", other)
    refused = cli("compare", phone, "--baseline", before, check=2)
    assert "not comparable: 2 devices: " in refused.stderr
    assert "--mixed" in refused.stderr
    assert refused.stderr.count("\n") == 1
    done = cli("compare", phone, "--baseline", before, "--mixed", check=0)
    assert "warning: not comparable" in done.stderr
    assert "on battery during 6 of 6 processes" in done.stdout
    assert "governor other than performance during 6 of 6" in done.stdout


def test_conditions_of_one_device_are_compared_with_each_other(tmp_path):
    lines = sweep(tmp_path / "b")
    phone = dataclasses.replace(lines[0].device, cpu_model="Cortex-A76", kind="adb")
    slow = dataclasses.replace(lines[0].conditions, governor="powersave")
    fast = dataclasses.replace(lines[0].conditions, governor="performance")
    here = [dataclasses.replace(r, conditions=fast) for r in lines]
    there = [dataclasses.replace(r, device=phone, conditions=slow) for r in lines]
    assert compare.mixtures([*here, *there]) == []
    found = compare.against_file(fold([*here, *there]), fold([*here, *there]))
    assert {c.device for c in found} == set(compare.devices([*here, *there]))
    assert all(c.device == c.base_device and c.ratio == 1 for c in found)
    (line,) = compare.mixtures([*here, dataclasses.replace(lines[0], conditions=slow)])
    assert line.endswith("with 2 of governor: performance; powersave")
    dark = dataclasses.replace(fast, governor=None)  # what cannot be read is no licence to mix
    (line,) = compare.mixtures([*here, dataclasses.replace(lines[0], conditions=dark)])
    assert line.endswith("with 2 of governor: performance; unknown")


@pytest.mark.parametrize(("load", "warned"), [(0.2, False), (9.0, True), (None, False)])
def test_a_baseline_from_a_quieter_hour_is_noted(tmp_path, load, warned):
    lines = sweep(tmp_path / "b", processes=1)
    state = dataclasses.replace(lines[0].conditions, load_average_1m=load)
    now = [dataclasses.replace(r, conditions=state) for r in lines]
    found = compare.load_change(now, lines)
    assert (found is not None) == warned
    assert not warned or found.startswith("load average 9.0, the baseline's was 0.1")
    assert compare.load_change(now, []) is None


def test_an_evaluation_stands_beside_the_bytes_of_its_bundle(cli, tmp_path, before):
    sha = sweep(tmp_path / "b")[0].artifact.sha256
    evaluation, model = tmp_path / "q.json", tmp_path / "model.json"
    figures = {"perplexity": 12.5, "perplexity_stderr": 0.25, "tokens": 64, "context": 64}
    evaluation.write_text(json.dumps({"source": "x", "sha256": sha, **figures}))
    model.write_text(json.dumps({"source": "x", "sha256": None, **figures}))
    done = cli("compare", before, evaluation, check=0)
    assert re.search(r"12\.5 +0\.49", done.stdout)  # 1.96 standard errors
    rows = json.loads(cli("compare", before, evaluation, "--json", check=0).stdout)["rows"]
    assert {r["layout"]: r["perplexity"] for r in rows} == {"shared": 12.5, "separate": None}
    evaluation.write_text(json.dumps({"source": "x", "sha256": "other", **figures}))
    assert "not among the results" in cli("compare", before, evaluation, check=0).stderr
    assert "evaluates no bundle" in cli("compare", before, model, check=1).stderr
    assert "no results to compare" in cli("compare", evaluation, check=2).stderr


def test_files_by_suffix(cli, tmp_path, before):
    for suffix, start in ((".md", "**"), (".csv", "name,backend"), (".json", "{\n")):
        out = tmp_path / "deep" / f"o{suffix}"
        cli("compare", before, "--baseline", "separate", "-o", out, check=0)
        assert out.read_text().startswith(start)
        assert list(out.parent.glob(".*")) == []
    assert "Against self-test Q-GQA-4 separate" in (tmp_path / "deep" / "o.md").read_text()
    assert "must end in .html" in cli("compare", before, "-o", "x.pdf", check=2).stderr


def test_nothing_is_replaced_unasked(cli, tmp_path, before):
    out = tmp_path / "o.md"
    out.write_text("mine")
    assert "give --overwrite" in cli("compare", before, "-o", out, check=2).stderr
    assert out.read_text() == "mine"
    cli("compare", before, "-o", out, "--overwrite", check=0)
    other = write(tmp_path / "r.json", sweep(tmp_path / "c"))
    text = other.read_text()
    done = cli("compare", before, other, "-o", other, "--overwrite", check=2)
    assert "which is compared" in done.stderr
    assert other.read_text() == text


def test_a_line_given_twice_is_no_second_process(cli, tmp_path, before):
    once = json.loads(cli("compare", before, "--json", check=0).stdout)
    done = cli("compare", before, before, "--json", check=0)
    assert json.loads(done.stdout) == once
    assert "6 lines are given more than once and count once" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fail_on_regression": "5%"}, "give --baseline"),
        ({"baseline": "separate", "fail_on_regression": "much"}, "must be a percentage"),
        ({"output": Path("r.html"), "budget": ["lots"]}, "size is 'lots'"),
        ({"budget": ["1GiB"]}, "give -o FILE.html"),
        ({"mixed": True}, "give --baseline"),
    ],
)
def test_misuse_is_one_line(before, options, words):
    with pytest.raises(UsageError, match=words) as error:
        run([before], **options)
    assert "\n" not in str(error.value)
