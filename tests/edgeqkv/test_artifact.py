"""Manifests: round trip, and everything a hostile or damaged one may try."""

import dataclasses
import json

import numpy as np
import pytest

from edgeqkv.artifact import (
    Artifact,
    Golden,
    file_entry,
    read_artifact,
    read_golden,
    write_golden,
    write_manifest,
)
from edgeqkv.cache import cache_spec
from edgeqkv.errors import BundleError
from tests.variants import spec


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"weights")
    model = spec(qkv_sharing="k=v")
    artifact = Artifact(
        backend="onnx",
        entry="model.bin",
        model=model,
        cache=cache_spec(model),
        cache_mode="growing",
        formulation="gemm-prefix",
        weights="fp32",
        capacities=(64,),
        prefill_chunk=16,
        files={"model.bin": file_entry(folder / "model.bin")},
        tools={"edgeqkv": "0"},
        details={},
        name="m",
    )
    write_manifest(folder, artifact)
    return folder, artifact


def edit(folder, change):
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_round_trip(bundle):
    folder, artifact = bundle
    assert read_artifact(folder) == artifact


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", "a\\..\\b", "x\0y"])
def test_a_path_outside_the_bundle_is_refused(bundle, name):
    folder, _ = bundle
    (folder.parent / "secret").write_text("s")
    entry = {"sha256": "0" * 64, "nbytes": 1}
    edit(folder, lambda d: d["files"].update({name: entry}))
    with pytest.raises(BundleError, match="outside the bundle"):
        read_artifact(folder)


def test_an_entry_outside_the_bundle_is_refused(bundle):
    folder, _ = bundle
    edit(folder, lambda d: d.update(entry="../model.bin"))
    with pytest.raises(BundleError, match="outside the bundle"):
        read_artifact(folder)


def test_a_link_out_of_the_bundle_is_refused(bundle, tmp_path):
    folder, _ = bundle
    (tmp_path / "secret").write_text("s")
    (folder / "link").symlink_to(tmp_path / "secret")
    edit(folder, lambda d: d["files"].update(link={"sha256": "0" * 64, "nbytes": 1}))
    with pytest.raises(BundleError, match="link out of the bundle"):
        read_artifact(folder)


def test_an_altered_file_is_refused(bundle):
    folder, _ = bundle
    (folder / "model.bin").write_bytes(b"weightz")
    with pytest.raises(BundleError, match="sha256"):
        read_artifact(folder)
    (folder / "model.bin").write_bytes(b"weight")
    with pytest.raises(BundleError, match="has 6 bytes, manifest says 7"):
        read_artifact(folder)
    (folder / "model.bin").unlink()
    with pytest.raises(BundleError, match="missing"):
        read_artifact(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema_version=99), "schema_version is 99"),
        (lambda d: d.update(surprise=1), "unknown key 'surprise'"),
        (lambda d: d.pop("cache"), "lacks 'cache'"),
        (lambda d: d.update(cache_mode="elastic"), "allowed: growing, static, none"),
        (lambda d: d.update(capacities=[]), "capacities"),
        (lambda d: d.update(capacities=[128, 64]), "capacities"),
        (lambda d: d.update(capacities=[32]), "capacities"),
        (lambda d: d.update(prefill_chunk=0), "prefill_chunk"),
        (lambda d: d.update(files=[]), "files"),
        (lambda d: d.update(entry=7), "entry is 7"),
        (lambda d: d["files"].update({"model.bin": {"sha256": 1, "nbytes": 7}}), "sha256"),
        (lambda d: d["model"].update(vocab_size=-1), "vocab_size is -1"),
        (lambda d: d["cache"].update(layout="double"), "allowed: none, shared, separate"),
        (lambda d: d.update(model=[]), "JSON object"),
    ],
)
def test_a_malformed_manifest_is_one_clear_error(bundle, change, words):
    folder, _ = bundle
    edit(folder, change)
    with pytest.raises(BundleError, match=words):
        read_artifact(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"a": NaN}'])
def test_a_manifest_that_is_no_json_object(bundle, text):
    folder, _ = bundle
    (folder / "manifest.json").write_text(text)
    with pytest.raises(BundleError):
        read_artifact(folder)


def test_what_is_not_a_bundle(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BundleError, match=r"not a bundle|does not exist"):
            read_artifact(path)


def test_golden_round_trip_and_damage(bundle):
    folder, _ = bundle
    golden = Golden(
        np.arange(3), np.ones(5, np.float32), np.arange(2), np.zeros((2, 5), np.float32)
    )
    write_golden(folder, golden)
    assert np.array_equal(read_golden(folder).prompt_ids, golden.prompt_ids)
    for wrong in (
        {"prompt_ids": golden.prompt_ids[:0]},
        {"decode_ids": golden.decode_ids[:1]},
        {"prefill_logits": golden.prefill_logits * np.float32(np.nan)},
    ):
        write_golden(folder, dataclasses.replace(golden, **wrong))
        with pytest.raises(BundleError, match=r"golden\.safetensors holds .*; export it again"):
            read_golden(folder)
    (folder / "golden.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(BundleError, match="cannot be read"):
        read_golden(folder)
