"""The page of `compare -o report.html`: what is in it, what may not get in, and that it draws."""

import dataclasses
import os
import re
from importlib.resources import files

import pytest

from device_bench import figures
from device_bench.compare import against_bundle
from device_bench.conditions import Bandwidth
from device_bench.report import headlines, parse_budget, report
from device_bench.result import Memory, Snapshot, append_result
from edgeqkv.errors import UsageError
from tests.device_bench import chromium
from tests.device_bench.results import result

HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(2)></style>{{ 7 * 7 }}&lt;"""
READ = tuple(Bandwidth(1, n << 20, 1e10) for n in (1, 256))
KEYS = ["memory-per-token", "cache-by-context", "decode-speed", "memory-stack", "quality"]


def snapshot(mib):
    return Snapshot(*[mib << 20] * 7)


@pytest.fixture
def lines(tmp_path):
    """Two layouts, two depths, two processes each, with memory, bandwidth and quality."""
    memory = Memory("test", snapshot(10), snapshot(20), snapshot(30), None, snapshot(40), 50 << 20)
    made = []
    for layout in ("shared", "separate"):
        for depth in (0, 512):
            line = result(tmp_path / layout, layout=layout, gen=4, depth=depth, memory=memory)
            state = dataclasses.replace(line.conditions, read_bandwidth=READ)
            line = dataclasses.replace(
                line, conditions=state, quality={"perplexity": 20.5, "perplexity_stderr": 0.5}
            )
            again = dataclasses.replace(line.workload, process=1)
            slower = dataclasses.replace(
                line.samples, repetitions=((500_000, 1_600_000, 2_700_000, 3_800_000),)
            )
            made += [line, dataclasses.replace(line, workload=again, samples=slower, memory=None)]
    return made


def hostile(lines):
    """Every free text of a result file, hostile."""
    return [
        dataclasses.replace(
            r,
            status="invalid",
            reason=HOSTILE,
            unstable=HOSTILE,
            model=dataclasses.replace(r.model, label=HOSTILE),
            device=dataclasses.replace(r.device, cpu_model=HOSTILE, features=(HOSTILE,)),
            quality={"perplexity": 20.5, "perplexity_stderr": 0.5, HOSTILE: HOSTILE},
            artifact=dataclasses.replace(
                r.artifact,
                **dict.fromkeys(("name", "backend", "weights", "formulation", "engine"), HOSTILE),
                tools={HOSTILE: HOSTILE},
            ),
        )
        for r in lines
    ]


def test_every_figure_has_its_table_and_its_samples(lines):
    page = report(lines)
    assert re.findall(r'<section id="([a-z-]+)">', page) == [*KEYS, "conditions"]
    for key in KEYS:
        section = page.split(f'<section id="{key}">')[1].split("</section>")[0]
        assert section.count("<svg ") == 2
        assert section.count("<details>") == section.count("<table>") == 2
        assert section.count("<tr>") > 4
    assert "1.1 1.1 1.1" in page  # the milliseconds between the tokens of a repetition
    assert "8,192" in page


def test_headlines_say_what_was_measured(lines):
    first, second = headlines(
        lines, figures.fold(lines)
    )  # two processes 10 % apart make no headline
    assert first.figure == "2\N{MULTIPLICATION SIGN}"
    assert "8,192\N{NO-BREAK SPACE}B a token for Q‑GQA‑4 shared, 16,384" in first.what
    assert second.figure == "2 of 2"
    steady = [dataclasses.replace(r, samples=lines[0].samples) for r in lines]
    assert headlines(steady, figures.fold(steady))[2].figure == "1,000"


def test_the_roofline_is_weights_and_cache_over_the_bandwidth(lines):
    (row,) = [r for r in figures.fold(lines) if r.layout == "shared" and r.depth == 512]
    weights = lines[0].artifact.step_weight_bytes
    spec = lines[0].model.spec
    looked_up = 4 * spec.hidden_size * spec.max_position_embeddings
    assert weights == 4 * spec.num_parameters() - looked_up
    assert row.step_bytes == weights + 8192 * (512 + 3)  # steps 2, 3 and 4 see 514, 515, 516 tokens
    assert row.limit_tok_s == pytest.approx(1e10 / row.step_bytes)
    assert row.limit_share == pytest.approx(row.decode_tok_s / row.limit_tok_s)


def test_nothing_of_a_result_file_becomes_markup(lines):
    nasty = hostile(lines)
    page = report(nasty, against_bundle(figures.fold(nasty), "separate"), 0.05)
    assert page.count("<script>") == page.count("</script>") == 1
    assert page.count("<style>") == page.count("</style>") == 1
    assert "<img" not in page
    assert "{{ 7 * 7 }}" in page
    assert page.count("&lt;script&gt;alert(1)") > 20


def test_what_is_missing_leaves_no_empty_figure(lines):
    bare = [dataclasses.replace(r, quality=None, memory=None) for r in lines]
    failed = [dataclasses.replace(r, samples=None, status="failed", reason="hung") for r in bare]
    assert [k for k in KEYS if f'id="{k}"' in report(bare)] == KEYS[:3]
    assert [k for k in KEYS if f'id="{k}"' in report(failed)] == KEYS[:2]
    assert "failed: self-test" in report(failed)


def test_interpreted_and_emulated_rows_are_marked(lines):
    devices = [dataclasses.replace(r.device, emulated=True) for r in lines]
    shown = report([dataclasses.replace(r, device=d) for r, d in zip(lines, devices, strict=True)])
    assert "self-test Q-GQA-4 shared (emulated)" in shown
    infos = [dataclasses.replace(r.artifact, interpreted=True) for r in lines]
    shown = report([dataclasses.replace(r, artifact=a) for r, a in zip(lines, infos, strict=True)])
    assert "self-test Q-GQA-4 shared (interpreted)" in shown
    assert 'id="decode-speed"' not in shown


def test_budgets():
    assert parse_budget("512MiB") == ("512.0 MiB", 512 << 20)
    assert parse_budget("a watch=1GiB") == ("a watch, 1.0 GiB", 1 << 30)
    for text in ("", "=1GiB", "a watch", "0MiB"):
        with pytest.raises(UsageError):
            parse_budget(text)


def _luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_can_be_told_from_the_paper():
    """WCAG 2.2: 4.5 to 1 for text, 3 to 1 for what is drawn; the two dark themes are the same."""
    css = files("device_bench").joinpath("report.css").read_text("utf-8")
    themes = [
        dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r"\{([^{}]*--paper:[^{}]*)\}", css)
    ]
    light, dark, chosen = themes
    assert dark == chosen
    for theme in (light, dark):
        assert set(theme) == set(light)
        for name, colour in theme.items():
            need = {"ink": 4.5, "soft": 4.5, "rule": 4.5, "weights": 3}.get(name)
            need = need or (3 if re.fullmatch(r"c\d", name) else 0)
            a, b = sorted((_luminance(colour), _luminance(theme["paper"])))
            assert (b + 0.05) / (a + 0.05) >= need, (name, colour)
        a, b = sorted((_luminance(theme["warn"]), _luminance(theme["warn-paper"])))
        assert (b + 0.05) / (a + 0.05) >= 4.5


DRAWN = """[...document.querySelectorAll('figure')].map(f => [...f.querySelectorAll('.mark')].filter(
  m => { const b = m.getBoundingClientRect(); return b.width + b.height > 2; }).length)"""


@pytest.mark.skipif(
    chromium.find() is None and not os.environ.get("EDGEQKV_REQUIRE_ALL"),
    reason="no chromium here: apt-get install chromium",
)
def test_the_page_in_a_browser(lines, tmp_path, cli):
    results, path = tmp_path / "r.jsonl", tmp_path / "report.html"
    for line in [*lines, *hostile(lines)]:
        append_result(results, line)
    cli("compare", results, "-o", path, "--budget", "a watch=64MiB", check=0)
    papers = set()
    with chromium.page() as page:
        for width, dark in ((1000, False), (390, True)):
            page.open(path, width=width, dark=dark)
            drawn = page.ask(DRAWN)
            assert len(drawn) == len(KEYS)
            assert min(drawn) >= 2, drawn
            assert page.ask("document.documentElement.scrollWidth") <= width
            assert page.ask("document.scripts.length") == 1
            assert page.ask("document.images.length") == 0
            papers.add(page.ask("getComputedStyle(document.body).backgroundColor"))
        assert len(papers) == 2
        page.ask("document.getElementById('theme').click()")
        assert page.ask("document.documentElement.dataset.theme") == "light"
        assert page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(253, 252, 250)"
        page.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.ask("document.documentElement.scrollWidth") <= 390
        assert page.problems == []
        assert {u for u in page.requests if not u.startswith("data:")} == {path.as_uri()}
