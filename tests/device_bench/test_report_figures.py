"""What the figures of the report draw and say, on results of the shape that `make demo` writes."""

import dataclasses
import os
import re

import pytest

from device_bench import slopes
from device_bench.figures import fold
from device_bench.report import headlines, report
from device_bench.result import BytesPerToken, MemoryPoint, append_result
from tests.device_bench import chromium
from tests.device_bench.results import result
from tests.device_bench.test_report import READ, lines  # noqa: F401 (a fixture)

ONE_OF_MANY = re.compile(r"(?<!of )\b1 (sweeps|processes|threads|lines|tokens|bundles|rows)\b")
BUNDLES = [  # backend, variant, layout, cache dtype, bytes per token of the cache and beside it
    ("coreml", "Q-MQA", "shared", "fp16", 256, None),
    ("executorch", "Q-K=V", "separate", "fp32", 4096, 277),
    ("executorch", "Q-K=V", "shared", "fp32", 2048, 288),
    ("executorch", "Q-MQA", "shared", "fp32", 512, 4651),
    ("onnx", "QKV", "separate", "fp32", 4096, 16),
    ("onnx", "Q-K=V", "separate", "fp32", 4096, 14),
    ("onnx", "Q-K=V", "shared", "fp32", 2048, 12),
    ("onnx", "Q-MQA", "shared", "fp32", 512, 96),
]


@pytest.fixture
def demo(tmp_path):
    """One sweep, one depth, two processes each; Core ML interpreted and without memory."""
    line = result(tmp_path / "bundle", gen=4, depth=512)
    state = dataclasses.replace(line.conditions, read_bandwidth=READ)
    made = []
    for i, (backend, variant, layout, dtype, each, beside) in enumerate(BUNDLES):
        interpreted = beside is None
        figures = BytesPerToken(each, each)
        if beside is not None:
            points = [MemoryPoint(t, each * t, (each + beside) * t) for t in range(128, 1025, 128)]
            figures = slopes.with_slopes(figures, "depth", points)
        info = dataclasses.replace(
            line.artifact, backend=backend, sha256=f"{i:064}", interpreted=interpreted
        )
        cache = dataclasses.replace(line.cache, layout=layout, dtype=dtype, bytes_per_token=figures)
        model = dataclasses.replace(line.model, label=variant)
        for process, ms in enumerate((1.0, 1.1 + i / 10)):
            times = tuple(round(1e6 * (0.5 + ms * n)) for n in range(4))
            made.append(
                dataclasses.replace(
                    line,
                    conditions=state,
                    artifact=info,
                    cache=cache,
                    model=model,
                    workload=dataclasses.replace(line.workload, process=process),
                    samples=dataclasses.replace(line.samples, repetitions=(times,)),
                )
            )
    return made


def section(page, key):
    return page.split(f'<section id="{key}">')[1].split("</section>")[0]


def wide(page, key):
    """A section's figure for a desktop, without the one for a phone."""
    return section(page, key).split('<div class="narrow">')[0]


def test_one_depth_is_a_row_for_each_bundle_with_its_limit(demo):
    page = report(demo)
    figure = wide(page, "decode-speed")
    timed = [r for r in fold(demo) if r.decode_tok_s]
    assert len(timed) == figure.count("mark dot") == figure.count("mark bound") == 7
    assert all(f", limit {r.limit_tok_s:,.0f}<" in figure for r in timed)
    assert "limit by read bandwidth" in figure
    assert "Dotted is the limit" in section(page, "decode-speed")
    unknown = [
        dataclasses.replace(r, conditions=dataclasses.replace(r.conditions, read_bandwidth=None))
        for r in demo
    ]
    shown = section(report(unknown), "decode-speed")
    assert not re.search("limit by|Dotted|mark bound", shown)


def test_an_interval_that_leaves_the_figure_ends_in_an_arrow(demo):
    page = report(demo)  # two processes twofold apart: Student's t with one degree of freedom
    assert "mark cut" in wide(page, "decode-speed")
    assert "An arrow: the interval goes on" in page
    alone = report([r for r in demo if not r.workload.process])
    assert not re.search("mark cut|An arrow|</i>95 % interval|Whiskers", alone)


def test_a_bar_says_what_the_cache_takes_and_what_the_process(demo):
    figure = wide(report(demo), "memory-per-token")
    assert ">512 B cache, 5,163 B process<" in figure
    assert ">256 B cache, declared<" in figure
    assert "workspace of the process" in figure
    assert "attention scores" in section(report(demo), "memory-per-token")
    bare = [r for r in demo if r.artifact.interpreted]
    assert not re.search("workspace of|attention scores", report(bare))


def test_the_doubt_about_a_process_is_said_where_it_is_large(demo):
    figures = demo[2].cache.bytes_per_token
    ends = dataclasses.replace(figures.ci95, measured_process=(2000.0, 6560.0))
    wide_one = dataclasses.replace(figures, ci95=ends)
    cache = dataclasses.replace(demo[2].cache, bytes_per_token=wide_one)
    page = report([dataclasses.replace(r, cache=cache) for r in demo[2:4]])
    assert ">4,096 B cache, 4,373 \N{PLUS-MINUS SIGN} 2,280 B process<" in page
    assert "half of a 95 % interval" in page


def test_one_of_a_thing_is_not_many(demo, lines):  # noqa: F811
    for made in (demo, demo[:1], lines, lines[:1]):
        assert not ONE_OF_MANY.search(report(made))
    assert "16 processes, 1 sweep<" in report(demo)


def test_two_bundles_of_one_label_are_called_by_their_names(demo):
    other = dataclasses.replace(demo[-1].artifact, name="the-other", sha256="f" * 64)
    page = report([*demo, dataclasses.replace(demo[-1], artifact=other)])
    assert "onnx Q-MQA shared the-other<" in wide(page, "memory-per-token")
    assert "the-other" not in report(demo)


def test_no_speed_is_the_most_that_may_not_be(demo):
    steady, loose = demo[2:4], demo[-2:]
    slow = dataclasses.replace(
        steady[0].samples, repetitions=((0, 2_000_000, 4_000_000, 6_000_000),)
    )
    steady = [dataclasses.replace(r, samples=slow) for r in steady]
    assert headlines(steady, fold(steady))[-1].figure == "500"
    both = steady + loose
    assert "tokens per second" not in " ".join(h.what for h in headlines(both, fold(both)))


# Texts that lie over each other, or that the page cuts: of every figure that is shown at this width.
CLASHES = """[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width)
  .flatMap(svg => {
    const page = document.documentElement.clientWidth;
    const all = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    const cut = all.filter(([, b]) => b.left < 0 || b.right > page).map(([t]) => 'cut: ' + t);
    return cut.concat(all.flatMap(([t, a], i) => all.slice(i + 1)
      .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.5)
      .map(([u]) => t + ' / ' + u)));
  })"""


@pytest.mark.skipif(
    chromium.find() is None and not os.environ.get("EDGEQKV_REQUIRE_ALL"),
    reason="no chromium here: apt-get install chromium",
)
def test_no_text_lies_over_another(demo, lines, tmp_path, cli):  # noqa: F811
    long = dataclasses.replace(demo[0].model, label="a variant whose name has no end " * 4)
    pages = {
        "demo": demo,
        "long": [*demo, *(dataclasses.replace(r, model=long) for r in lines)],
    }
    budgets = ["--budget", "a watch=2GiB", "--budget", "one that is as large=1900MiB"]
    with chromium.page() as page:
        for name, made in pages.items():
            results, path = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.html"
            for line in made:
                append_result(results, line)
            cli("compare", results, "-o", path, *(budgets if name != "demo" else []))
            for width in (390, 768, 1280):
                page.open(path, width=width)
                shown = page.ask(
                    "[...document.querySelectorAll('text')].filter(t => t.checkVisibility()).length"
                )
                assert shown > 40
                assert page.ask(CLASHES) == [], (name, width)
