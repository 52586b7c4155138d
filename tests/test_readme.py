"""Every command and every Python block of README.md runs, in order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")
# Not run here: the two make targets (one runs this test, the other is run below by its script),
# the installation, the download (tests/edgeqkv/test_importers*.py read it from a local hub cache), and
# what needs a phone, a browser or a C compiler (tests/device_bench/test_{adb,browser,native}.py).
ELSEWHERE = (
    "make demo",
    "make test",
    "pip install",
    "edgeqkv import hf:",
    "edgeqkv devices",
    "edgeqkv bench bundles/onnx --device",
    "edgeqkv bench bundles/onnx --engine",
)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


def commands():
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(ELSEWHERE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("readme")
    (path / "checkpoints").symlink_to(ROOT / "checkpoints")
    return path


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(command, folder, environment):
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.timeout(1200)
def test_commands_and_python_blocks(folder, environment):
    for sdk in ("onnxruntime", "executorch", "coremltools"):
        pytest.importorskip(sdk)
    assert len(commands()) >= 10
    for line in commands():
        run(["sh", "-c", line], folder, environment)
    for block in blocks("python"):
        run([sys.executable, "-c", block], folder, environment)


@pytest.mark.timeout(1200)
def test_the_demo_ends_with_the_table(tmp_path, environment):
    for sdk in ("onnxruntime", "executorch", "coremltools"):
        pytest.importorskip(sdk)
    demo = {**environment, "OUT": str(tmp_path / "out")}
    out = run(["sh", "docs/demo.sh"], ROOT, demo)
    assert "\n$ edgeqkv bench " in out
    assert '--prompt "In the beginning" -n 40\n' in out
    table = out[out.index("$ edgeqkv compare") :]
    for backend in ("onnx", "executorch", "coreml"):
        assert re.search(rf"^{backend} ", table, re.M)


def test_what_is_not_run_here_is_still_true():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^demo:", makefile, re.M)
    assert re.search(r"^test:", makefile, re.M)
    assert "docs/demo.sh" in makefile
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra in ",".join(re.findall(r"\.\[([\w,]+)\]", TEXT)).split(","):
        assert re.search(rf"^{extra} = \[", pyproject, re.M), extra


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (ROOT / target).exists(), target
