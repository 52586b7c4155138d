"""The export command as a user runs it: whole bundles, one-line refusals, nothing half-written."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from edgeqkv.artifact import read_artifact, write_manifest
from edgeqkv.model_dir import save_model_dir
from edgeqkv.tokenizer import byte_tokenizer
from export.audit import audit_bundle
from export.verify import verify_bundle
from tests.variants import VARIANTS, random_decoder

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")


def write_model(folder, name, seed=0):
    decoder = random_decoder(VARIANTS[name], seed)
    save_model_dir(folder, decoder.spec, decoder.state_dict(), {"source": "test"})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "q-mqa", "q-mqa")


@pytest.fixture(scope="module")
def exported(tmp_path_factory, model):
    out = tmp_path_factory.mktemp("exported")
    result = run_cli("export", model, "-b", "onnx", "-o", out, "--json")
    assert result.returncode == 0, result.stderr
    return out / "onnx", json.loads(result.stdout)


def run_cli(*arguments, **options):
    command = [sys.executable, "-c", "from edgeqkv.cli import main; main()", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )


def test_a_bundle_is_complete_and_true(exported):
    bundle, rows = exported
    artifact = read_artifact(bundle)
    assert {"manifest.json", "golden.safetensors"} < {p.name for p in bundle.iterdir()}
    assert rows[0]["bytes_per_token"] == artifact.cache.bytes_per_token == 2 * 1 * 16 * 4
    assert {"edgeqkv", "torch", "onnx"} <= set(artifact.tools)
    audit = audit_bundle(bundle)
    assert audit.problems == ()
    assert audit.facts.bytes_per_token == artifact.cache.bytes_per_token
    assert verify_bundle(bundle).passed


def test_verify_and_audit_commands(exported, model, cli):
    bundle, _ = exported
    for arguments in (["verify", bundle, "--reference", model], ["verify", bundle]):
        rows = json.loads(cli(*arguments, "--json", check=0).stdout)
        ways = [c["way"] for c in rows[0]["comparisons"]]
        assert rows[0]["passed"]
        assert len(ways) == 4
    assert json.loads(cli("audit", bundle, "--json", check=0).stdout)[0]["passed"]
    table = cli("audit", bundle, check=0).stdout
    assert max(map(len, table.splitlines())) <= 200  # the path itself may be long


def test_verify_catches_other_weights(exported, tmp_path, cli):
    other = write_model(tmp_path / "other", "q-mqa", seed=9)
    result = cli("verify", exported[0], "--reference", other, check=4)
    assert "FAILED" in result.stdout
    said = f"error: 1 of 1 bundles failed verification: {exported[0]}: prefill: "
    assert result.stderr.splitlines()[-1].startswith(said)


def test_audit_catches_a_manifest_that_lies_about_its_layout(tmp_path, cli):
    model = write_model(tmp_path / "m", "q-k=v")
    cli("export", model, "-b", "onnx", "-o", "out", "--cache-layout", "separate", check=0)
    bundle = tmp_path / "out/onnx"
    artifact = read_artifact(bundle)
    assert audit_bundle(bundle).problems == ()
    lie = artifact.to_dict()
    lie["cache"]["layout"] = "shared"
    (bundle / "manifest.json").write_text(json.dumps(lie))
    result = cli("audit", bundle, check=4)
    assert "layer 0 holds 2 cache tensors" in result.stdout


def test_existing_output_is_refused_before_work_and_replaced_on_request(exported, model, cli):
    bundle, _ = exported
    before = (bundle / "manifest.json").stat().st_mtime_ns
    result = cli("export", model, "-b", "onnx", "-o", bundle.parent, check=2)
    assert "--overwrite" in result.stderr
    assert (bundle / "manifest.json").stat().st_mtime_ns == before


def test_a_broken_tokenizer_is_refused_before_work(model, tmp_path, cli):
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    result = cli("export", folder, "-o", "out", "-b", "onnx", check=1)
    (line,) = result.stderr.splitlines()
    assert "tokenizer.json is not a readable tokenizer" in line
    assert not (tmp_path / "out").exists()


def test_an_output_below_a_file_is_refused_before_work(model, tmp_path, cli):
    (tmp_path / "out").touch()
    result = cli("export", model, "-o", "out", "-b", "onnx", check=2)
    (line,) = result.stderr.splitlines()
    assert "out is a file; the output is a folder" in line


@pytest.mark.skipif(importlib.util.find_spec("coremltools") is None, reason="no coremltools")
def test_dry_run_writes_nothing(model, tmp_path, cli):
    result = cli("export", model, "-o", "out", "--dry-run", "-b", "onnx,coreml", "--json", check=0)
    onnx, coreml = json.loads(result.stdout)
    assert onnx["bytes_per_token"] == 128
    assert [(r["weights"], r["stored_weights"]) for r in (onnx, coreml)] == [
        ("fp32", "fp32"),
        ("fp32", "fp16"),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-b", "tflite"], "allowed: onnx, executorch, coreml"),
        (["-b", ","], "names no backend"),
        (["-b", "onnx,../onnx"], "allowed: onnx, executorch, coreml"),
        (["--max-context", "65"], "--max-context: max context 65 exceeds"),
        (["--max-context", "3"], "too small"),
        (["--cache-dtype", "int3"], "allowed: fp32, fp16, int8"),
        (["--cache-layout", "both"], "allowed: auto, shared, separate"),
        (["--onnx-attention", "magic"], "--onnx-attention is 'magic'; allowed: auto, gemm, gqa"),
        (["--et-attention", "custom"], "--et-attention custom is for executorch; -b has onnx"),
        (["-b", "executorch", "--io", "optimum"], "--io optimum is for onnx"),
    ],
)
def test_bad_requests_are_one_line(model, cli, tmp_path, arguments, words):
    base = [] if "-b" in arguments else ["-b", "onnx"]
    result = cli("export", model, "-o", "out", *base, *arguments)
    assert result.returncode == 2
    assert words in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_is_one_line(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path, words in (
        ("empty", "config.json"),
        ("file", "edgeqkv import"),
        ("gone", "does not exist"),
    ):
        result = cli("export", path, "-o", "out", "-b", "onnx", check=1)
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_shared_layout_of_a_model_whose_key_and_value_differ(cli, tmp_path):
    model = write_model(tmp_path / "m", "gqa")
    result = cli("export", model, "-b", "onnx", "-o", "out", "--cache-layout", "shared", check=2)
    assert "shared is impossible for GQA-2" in result.stderr


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_kill_in_the_middle_leaves_no_bundle(model, tmp_path, sent):
    code = "from edgeqkv.cli import main; main()"
    arguments = ["export", model, "-b", "onnx", "-o", tmp_path / "out"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    for _ in range(1200):  # until the temporary sibling exists: the export is in its middle
        if list((tmp_path / "out").glob(".onnx.*.tmp")) or process.poll() is not None:
            break
        time.sleep(0.05)
    assert process.poll() is None
    os.kill(process.pid, sent)
    said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == (-sent if sent == signal.SIGKILL else 128 + sent)
    assert not (tmp_path / "out/onnx").exists()
    if sent != signal.SIGKILL:
        assert not (tmp_path / "out").exists()
        assert said.splitlines()[-1].startswith("error: ")
    assert run_cli(*arguments, "--json").returncode == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["onnx"]


def test_a_full_disk_is_one_line_and_leaves_nothing(model, tmp_path):
    """A limit on file size stands in for the disk: the write fails the same way, in the middle."""
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "from edgeqkv.cli import main; main()"
    )
    arguments = ["export", model, "-b", "onnx", "-o", tmp_path / "out"]
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_sdk_names_the_pip_command(model, tmp_path):
    """Every backend's SDK, hidden from the import system."""
    for backend, sdk in (("onnx", "onnx"), ("executorch", "executorch"), ("coreml", "coremltools")):
        code = f"import sys; sys.modules['{sdk}'] = None\nfrom edgeqkv.cli import main; main()"
        arguments = ["export", model, "-b", backend, "-o", tmp_path / "out"]
        result = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 1
        assert f"pip install 'edgeqkv[{backend}]'" in result.stderr.splitlines()[-1]


def test_the_tokenizer_travels_with_the_bundle(model, tmp_path, cli):
    copy = tmp_path / "with-tokenizer"
    shutil.copytree(model, copy)
    (copy / "tokenizer.json").write_text(byte_tokenizer().to_str(), "utf-8")
    cli("export", copy, "-b", "onnx", "-o", "out", "--no-verify", check=0)
    artifact = read_artifact(tmp_path / "out/onnx")
    assert "tokenizer.json" in artifact.files
    write_manifest(tmp_path / "out/onnx", artifact)
    assert read_artifact(tmp_path / "out/onnx") == artifact
