import csv
import dataclasses
import io
import json

import pytest

from device_bench.compare import against_bundle, workload_label
from device_bench.figures import fold
from device_bench.ratios import ratios
from device_bench.result import append_result
from device_bench.table import headings, short, tables
from tests.device_bench.results import result


@pytest.fixture
def lines(tmp_path):
    """Shared and separate bundles of the same weights, prefill and decode at two depths."""
    return [
        result(tmp_path / layout, layout=layout, gen=gen, depth=depth)
        for layout in ("shared", "separate")
        for depth in (0, 512)
        for gen in (0, 4)
    ]


@pytest.fixture
def written(lines, tmp_path):
    path = tmp_path / "r.jsonl"
    for line in lines:
        append_result(path, line)
    return path


def test_lines_of_a_bundle_fold_into_rows(lines):
    rows = fold(lines)
    assert [(r.layout, r.depth) for r in rows] == [
        ("separate", 0),
        ("separate", 512),
        ("shared", 0),
        ("shared", 512),
    ]
    for row in rows:
        assert (row.n_prompt, row.n_gen, row.status) == (128, 4, "ok")
        assert row.load_ms == 5
        assert row.ttft_ms == pytest.approx(0.128)
        assert row.prefill_tok_s == pytest.approx(1e6)
        assert row.decode_tok_s == pytest.approx(1000)
        assert row.tpot_ms == row.itl_p50_ms == row.itl_p99_ms == pytest.approx(1)
        assert row.measured_process - row.measured_cache == pytest.approx(1024)


def test_another_test_at_the_same_depth_is_a_row_of_its_own(lines):
    """-pg 64,4 decodes behind its prompt: that is no second process of tg4."""
    (shared, *_) = [r for r in lines if r.cache.layout == "shared" and r.workload.n_gen]
    both = dataclasses.replace(shared.workload, n_prompt=64)
    stamps = tuple(range(1_000_000, 11_000_000, 2_000_000))
    samples = dataclasses.replace(shared.samples, repetitions=(stamps,))
    rows = fold([*lines, dataclasses.replace(shared, workload=both, samples=samples)])
    here = [r for r in rows if (r.layout, r.depth) == ("shared", shared.workload.n_depth)]
    assert [(r.n_prompt, r.n_gen) for r in here] == [(128, 4), (64, 4)]
    assert [len(r.decode_by_process) for r in here] == [1, 1]
    assert [r.decode_tok_s for r in here] == pytest.approx([1000, 500])
    made = tables([*lines, dataclasses.replace(shared, workload=both)])[-1]
    shown = [row[made.columns.index("test")] for row in made.rows]
    assert {"pp128, tg4", "pp64+tg4"} <= set(shown)
    again = dataclasses.replace(shared.workload, n_prompt=128)
    # as many tokens as the two tests, decoded 128 tokens deeper
    (same,) = fold([dataclasses.replace(shared, workload=again, samples=samples)])
    assert (same.depth, same.decode_depth) == (here[0].depth, here[0].decode_depth + 128)
    assert workload_label(same) == workload_label(here[0]).replace(", tg4", "+tg4")
    assert against_bundle([*here, dataclasses.replace(same, sha256="x", name="x")], "x") == []


def test_processes_count_the_same_however_many_repetitions_they_made(lines):
    slower = dataclasses.replace(
        lines[0], samples=dataclasses.replace(lines[0].samples, repetitions=((256_000,),) * 5)
    )
    (first, *_) = [r for r in fold([*lines, slower]) if r.layout == "shared"]
    assert first.ttft_ms == pytest.approx((0.128 + 0.256) / 2)
    assert first.prefill_by_process == pytest.approx((1e6, 5e5))
    low, high = first.prefill_ci95
    assert low < 5e5 < 1e6 < high  # two processes say little


def test_shared_is_half_of_separate(lines):
    (ratio,) = ratios(fold(lines), lines)
    assert (ratio.what, ratio.against) == ("Q-GQA-4 shared", "separate, same weights")
    assert ratio.formula == ratio.declared == ratio.measured_cache == 0.5
    assert ratio.decode_tok_s == 1


def test_a_variant_is_set_against_qkv_of_its_size(lines):
    spec = dataclasses.replace(lines[0].model.spec, qkv_sharing="none", num_key_value_heads=8)
    plain = [
        dataclasses.replace(
            line,
            model=dataclasses.replace(line.model, label="QKV", spec=spec),
            artifact=dataclasses.replace(line.artifact, sha256="q", name="qkv"),
        )
        for line in lines
        if line.cache.layout == "separate"
    ]
    found = {
        (r.what, r.against): r.measured_cache for r in ratios(fold(lines + plain), lines + plain)
    }
    assert found[("Q-GQA-4 shared", "QKV")] == 0.5
    assert found[("Q-GQA-4 separate", "QKV")] == 1
    bigger = dataclasses.replace(spec, num_hidden_layers=9)
    other = [dataclasses.replace(p, model=dataclasses.replace(p.model, spec=bigger)) for p in plain]
    assert len(ratios(fold(lines + other), lines + other)) == 1


def test_the_table_fits_and_holds_the_figures(cli, written):
    done = cli("compare", written, check=0)
    assert max(map(len, done.stdout.splitlines())) <= 100
    row = next(x for x in done.stdout.splitlines() if x.startswith("self-test Q-GQA-4 shared"))
    assert row.split()[:7] == ["self-test", "Q-GQA-4", "shared", "8192", "8192", "8192", "0.0"]
    assert "separate, same weights" in done.stdout
    assert "Speed by threads and depth" in done.stdout
    assert done.stderr == ""


def test_wide_figures_still_fit(lines):
    wide = [
        dataclasses.replace(
            line,
            artifact=dataclasses.replace(line.artifact, backend="executorch", nbytes=9_999 << 20),
            model=dataclasses.replace(line.model, label="Q-GQA-8"),
            cache=dataclasses.replace(
                line.cache,
                bytes_per_token=dataclasses.replace(
                    line.cache.bytes_per_token,
                    formula=180_224,
                    declared=180_224,
                    measured_cache=180_224.4,
                ),
            ),
        )
        for line in lines
    ]
    for table in tables(wide):
        widths = [
            max(len(part) for cell in (name, *cells) for part in str(cell).split("\n"))
            for name, *cells in zip(headings(table.columns), *table.rows, strict=True)
        ]
        assert sum(widths) + len(widths) - 1 <= 100, table.title


def test_interpreted_timings_are_withheld(lines, tmp_path, cli):
    path = tmp_path / "i.jsonl"
    for line in lines:
        info = dataclasses.replace(line.artifact, interpreted=True, engine="mil-interpreter")
        append_result(path, dataclasses.replace(line, artifact=info))
    text = cli("compare", path, check=0).stdout
    assert "interpreted" in text
    assert "1000" not in text
    (row, *_) = json.loads(cli("compare", path, "--json", check=0).stdout)["rows"]
    assert row["interpreted"] is True
    assert row["decode_tok_s"] is row["ttft_ms"] is row["load_ms"] is None


def test_failed_and_invalid_rows_show_their_reason(lines, tmp_path, cli):
    path = tmp_path / "r.jsonl"
    failed = dataclasses.replace(lines[1], status="failed", reason="it hung", samples=None)
    invalid = dataclasses.replace(lines[2], status="invalid", reason="2 is not 1")
    for line in (lines[0], failed, invalid):
        append_result(path, line)
    text = cli("compare", path, check=0).stdout
    assert "failed: self-test Q-GQA-4 shared tg4, 1 thread: it hung" in text
    assert "invalid: self-test Q-GQA-4 shared pp128 @ d512, 1 thread: 2 is not 1" in text


def test_only_failures_make_a_table_too(lines, tmp_path, cli):
    path = tmp_path / "r.jsonl"
    append_result(path, dataclasses.replace(lines[0], status="failed", reason="no", samples=None))
    assert "failed: self-test" in cli("compare", path, check=0).stdout


def test_markdown_csv_and_json_say_the_same(cli, written):
    text = cli("compare", written, "--markdown", check=0).stdout
    header = next(x for x in text.splitlines() if x.startswith("| backend"))
    assert "bytes/token declared" in header
    assert all(
        x.count("|") == y.count("|")
        for x, y in zip(text.splitlines()[2:4], text.splitlines()[3:5], strict=True)
    )
    rows = list(csv.DictReader(io.StringIO(cli("compare", written, "--csv", check=0).stdout)))
    data = json.loads(cli("compare", written, "--json", check=0).stdout)
    assert len(rows) == len(data["rows"]) == 4
    for flat, full in zip(rows, data["rows"], strict=True):
        assert float(flat["measured_cache"]) == full["measured_cache"]
        assert flat["peak_rss"] == ""
        assert full["peak_rss"] is None
    assert cli("compare", written, "--csv", "--json", check=2).stderr.count("\n") == 1


def test_several_files_and_a_cut_line(cli, written, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_bytes(written.read_bytes() + b'{"schema_version": 1, "st')
    done = cli("compare", written, other, check=0)
    assert "other.jsonl: line 9 was cut short (a killed run?); skipped" in done.stderr


def test_other_files_are_refused_in_one_line(cli, tmp_path):
    foreign = tmp_path / "notes.txt"
    foreign.write_text("hello\n")
    for path, words in ((foreign, "line 1 is not JSON"), (tmp_path / "none.jsonl", "No such file")):
        done = cli("compare", path, check=1)
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_machines_are_not_mixed_in_silence(cli, lines, tmp_path):
    path = tmp_path / "r.jsonl"
    other = dataclasses.replace(lines[0].device, cpu_model="Cortex-A76")
    append_result(path, lines[0])
    append_result(path, dataclasses.replace(lines[0], device=other))
    done = cli("compare", path, check=0)
    assert "warning: not comparable: 2 devices: " in done.stderr
    titles = [x for x in done.stdout.splitlines() if ": pp128 " in x]
    assert [t.startswith("Cortex-A76") for t in titles] == [False, True]  # rows that look alike


def test_a_crowded_machine_is_mentioned(cli, lines, tmp_path):
    path = tmp_path / "r.jsonl"
    state = dataclasses.replace(lines[0].conditions, load_average_1m=999.0)
    append_result(path, dataclasses.replace(lines[0], conditions=state))
    assert "more runnable processes than CPUs during 1 of 1" in cli("compare", path, check=0).stdout


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, None), (0.123, 0.12), (12.34, 12.3), (123.4, 123.4), (4264.2, 4264), (-3.0, -3.0)],
)
def test_numbers_are_short(value, shown):
    assert short(value) == shown
