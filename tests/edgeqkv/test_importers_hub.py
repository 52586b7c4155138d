"""``hf:`` against a hub cache laid out on disk as huggingface_hub lays it out; no network."""

import json

import pytest
import torch

from edgeqkv.errors import CheckpointError
from edgeqkv.importers import read_checkpoint
from tests import upstream

pytest.importorskip("huggingface_hub")
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "BrainChip-AI/qkv-fineweb-300m"
FILE = "checkpoints/qkv_keqv_300m_fineweb_edu.pt"


@pytest.fixture
def home(tmp_path):
    """HF_HOME with ``files`` of one repository in its cache."""

    def put(files):
        repo = tmp_path / "hf" / "hub" / ("models--" + REPO.replace("/", "--"))
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        for number, (name, write) in enumerate(files.items()):
            blob = repo / "blobs" / f"{number:040x}"
            blob.parent.mkdir(exist_ok=True)
            write(blob)
            link = repo / "snapshots" / COMMIT / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
        return tmp_path / "hf"

    return put


@pytest.fixture
def offline(home, monkeypatch):
    """The same for this process: what HF_HOME and HF_HUB_OFFLINE=1 set when the library starts."""

    def put(files):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home(files) / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    return put


def checkpoint(path):
    torch.save(upstream.three_projections("Q-K=V", prefix="_orig_mod.")[0], path)


def card(path):
    path.write_text("model card")


def test_the_command_of_the_readme(home, cli, tmp_path):
    files = {FILE: checkpoint, "README.md": card}
    env = {"HF_HOME": str(home(files)), "HF_HUB_OFFLINE": "1"}
    source = f"hf:{REPO}/{FILE}"
    result = cli("import", source, "-o", tmp_path / "model", "--json", env=env, check=0)
    assert json.loads(result.stdout)["label"] == "Q-K=V"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["provenance"]["source"] == source


def test_the_only_checkpoint_of_a_repository_is_taken(offline):
    offline({FILE: checkpoint, "README.md": card})
    assert read_checkpoint(f"hf:{REPO}").spec.label == "Q-K=V"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            f"hf:{REPO}",
            f"has 2 files ending in .pt or .pth: a.pt, b.pth; name one as hf:{REPO}/FILE",
        ),
        (f"hf:{REPO}/absent.pt", "cannot be reached and absent.pt is not in the local cache"),
        ("hf:no/body", "cannot be reached and no/body is not in the local cache"),
        ("hf:no/body/f.pt", "cannot be reached and f.pt is not in the local cache"),
        ("hf:name", "is not hf:OWNER/NAME or hf:OWNER/NAME/FILE"),
        ("hf:", "is not hf:OWNER/NAME or hf:OWNER/NAME/FILE"),
        ("hf:bad..name/x--y/f.pt", "is not a repository name"),
    ],
)
def test_what_cannot_be_taken_is_one_line(offline, source, words):
    offline({"a.pt": checkpoint, "b.pth": checkpoint, "c.bin": checkpoint})
    with pytest.raises(CheckpointError) as e:
        read_checkpoint(source)
    assert words in str(e.value)
    assert str(e.value).startswith(source)
    assert "\n" not in str(e.value)


def test_a_repository_without_a_checkpoint(offline):
    offline({"README.md": card})
    with pytest.raises(CheckpointError, match=r"has 0 files ending in \.pt or \.pth: none"):
        read_checkpoint(f"hf:{REPO}")
