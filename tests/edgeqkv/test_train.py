"""edgeqkv train: learning, resuming, stopping, the written format, and the checkpoints we ship."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from edgeqkv.cli import main
from edgeqkv.corpus import split, train_tokenizer
from edgeqkv.model import Decoder
from edgeqkv.model_dir import load_any
from edgeqkv.paper_checkpoint import from_paper_state, to_paper_state
from edgeqkv.perplexity import evaluate, logits
from edgeqkv.spec import ModelSpec
from edgeqkv.train import TrainConfig, batch_of, initialise, save_atomically, train

SHIPPED = Path(__file__).parents[2] / "checkpoints"
SENTENCES = (
    "The lamp is on the table.\n",
    "A bird sang in the old tree.\n",
    "Rain fell all day.\n",
)
TEXT = "".join(SENTENCES[i * i % 7 % 3] for i in range(120))
TINY = ["--layers", "1", "--hidden", "32", "--heads", "4", "--context", "32", "--vocab-size", "280"]


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["edgeqkv", "train", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    if stop.value.code:
        raise stop.value


def fails(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: object) -> str:
    """The one error line of a command that must fail."""
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, *arguments)
    assert stop.value.code not in (0, None)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return path


def spec_of(checkpoint: dict[str, Any]) -> ModelSpec:
    """The spec of a checkpoint that train wrote (the importer infers the variant instead)."""
    config = checkpoint["model_config"]
    return ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["n_embd"],
        num_hidden_layers=config["n_layer"],
        num_attention_heads=config["n_head"],
        num_key_value_heads=config.get("n_kv_groups", config["n_head"]),
        head_dim=config["n_embd"] // config["n_head"],
        intermediate_size=config["n_inner"],
        max_position_embeddings=config["n_positions"],
        attention_scale=(config["n_embd"] // config["n_head"]) ** -0.5,
        qkv_sharing=checkpoint["train_config"]["qkv_sharing"],
    )


def load(path: Path) -> tuple[Decoder, dict[str, Any]]:
    checkpoint = torch.load(path, weights_only=True)
    model = Decoder(spec_of(checkpoint))
    state = from_paper_state(model.spec, checkpoint["model_state_dict"])
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval(), checkpoint


def test_learns_a_small_text(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    command(
        monkeypatch,
        "--text",
        text,
        "-o",
        out,
        *TINY,
        "--steps",
        80,
        "--batch",
        8,
        "--lr",
        1e-2,
        "--json",
    )
    result = json.loads(capsys.readouterr().out)
    model, checkpoint = load(Path(result["checkpoint"]))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    untrained = Decoder(model.spec)
    initialise(untrained, 0)
    before = evaluate(untrained, tokenizer, split(TEXT)[1])
    assert before["loss"] == pytest.approx(math.log(model.spec.vocab_size), rel=0.1)
    assert result["held_out_loss"] < before["loss"] / 4
    assert result["train_loss"] < before["loss"] / 4
    assert checkpoint["val_metrics"]["perplexity"] == result["held_out_perplexity"]


def test_perplexity_and_bits_per_byte_of_a_known_distribution() -> None:
    tokenizer = train_tokenizer(TEXT, 256)  # every token is one byte
    spec = ModelSpec(256, 8, 1, 1, 1, 8, 8, 16, 1.0)
    model = Decoder(spec)
    torch.nn.init.zeros_(model.wte.weight)  # tied: all logits are 0
    metrics = evaluate(model, tokenizer, "Grüße aus dem Tal. " * 5)
    assert metrics["perplexity"] == pytest.approx(256, rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(8, rel=1e-5)
    assert metrics["tokens"] == 21 * 5 - 1  # two letters take two bytes


def test_training_attention_is_the_reference_attention() -> None:
    spec = ModelSpec(64, 32, 2, 4, 2, 8, 64, 24, 0.3, qkv_sharing="k=v")
    model = Decoder(spec)
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits(model, ids, torch.arange(24)), model(ids))


def test_the_last_steps_read_whole_sequences_and_every_position_is_trained() -> None:
    config = TrainConfig(steps=100, batch=2, lr=1e-3, seed=0, save_every=1)
    ids = torch.arange(1000)
    trained = set()
    for step in range(100):
        windows, positions = batch_of(ids, 32, config, step)
        length = 32 if step >= 90 else 8
        assert windows.shape == (2, length + 1)
        assert torch.equal(windows - windows[:, :1], torch.arange(length + 1).expand(2, -1))
        assert len(positions) == length
        trained |= set(positions.tolist()) if step < 90 else set()
    assert trained == set(range(32))  # by the short windows alone


def test_held_out_is_the_end_of_the_text_from_a_line_start() -> None:
    train_text, held_out = split(TEXT)
    assert train_text + held_out == TEXT
    assert train_text.endswith("\n")
    assert len(TEXT) * 0.05 - 40 < len(held_out) <= len(TEXT) * 0.05


def test_resumed_weights_are_the_uninterrupted_ones(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--text", text, *TINY, "--kv-heads", 1, "--steps", 9, "--batch", 2]
    command(monkeypatch, *flags, "-o", tmp_path / "whole")

    def stop_after_step_6(data: Any, path: Path) -> None:
        save_atomically(data, path)
        if data["step"] == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("edgeqkv.train.save_atomically", stop_after_step_6)
        with pytest.raises(SystemExit, match="130"):
            command(patch, *flags, "-o", tmp_path / "parts", "--save-every", 3)
    assert not (tmp_path / "parts" / "final_model.pt").exists()
    command(monkeypatch, *flags, "-o", tmp_path / "parts", "--resume")
    whole, parts = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "parts")
    )
    for name, tensor in whole["model_state_dict"].items():
        assert torch.equal(tensor, parts["model_state_dict"][name]), name
    for i, moments in whole["optimizer_state_dict"]["state"].items():
        assert torch.equal(
            moments["exp_avg_sq"], parts["optimizer_state_dict"]["state"][i]["exp_avg_sq"]
        )


def test_a_finished_run_can_be_trained_further(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--text", text, *TINY, "--lr", 1e-2, "-o", tmp_path / "out"]
    command(monkeypatch, *flags, "--steps", 10)
    short = torch.load(tmp_path / "out" / "final_model.pt", weights_only=True)
    command(monkeypatch, *flags, "--steps", 40, "--resume")
    longer = torch.load(tmp_path / "out" / "final_model.pt", weights_only=True)
    assert (short["step"], longer["step"]) == (10, 40)
    assert short["tokens_seen"] == 9 * 8 + 1 * 32
    assert longer["tokens_seen"] == short["tokens_seen"] + 26 * 8 + 4 * 32
    assert longer["val_metrics"]["loss"] < short["val_metrics"]["loss"] - 0.5


def test_ctrl_c_stops_between_steps_and_saves(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--text", str(text), *TINY, "--steps", "5000", "-o", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from edgeqkv.cli import main; main()", "train", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    first = process.stderr.readline()  # progress: training is under way
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) == 130, first + rest
    stopped = re.search(r"stopped after step (\d+) of 5000; --resume continues", rest)
    assert stopped
    assert "Traceback" not in rest
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint.pt", "tokenizer.json"]
    _, checkpoint = load(out / "checkpoint.pt")
    assert checkpoint["step"] == int(stopped[1])


def test_a_failed_save_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_atomically({"step": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        save_atomically({"step": 2, "bad": lambda: None}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


VARIANTS = [  # sharing, key/value heads, {projection: rows} of SEEDS for hidden 32, head_dim 8
    ("none", 4, {"c_attn": 96}),
    ("q=k", 4, {"c_kv": 64}),
    ("k=v", 4, {"c_q": 32, "c_k": 32}),
    ("q=k=v", 4, {"c_k": 32}),
    ("none", 2, {"c_q": 32, "c_kv": 32}),
    ("none", 1, {"c_q": 32, "c_kv": 16}),
    ("k=v", 2, {"c_q": 32, "c_k": 16}),
    ("k=v", 1, {"c_q": 32, "c_kv": 8}),
]


@pytest.mark.parametrize(("sharing", "groups", "projections"), VARIANTS)
def test_checkpoint_has_the_names_and_shapes_of_the_papers_code(
    tmp_path: Path, sharing: str, groups: int, projections: dict[str, int]
) -> None:
    tokenizer = train_tokenizer(TEXT, 280)
    spec = ModelSpec(320, 32, 1, 4, groups, 8, 128, 16, 8**-0.5, qkv_sharing=sharing)
    train(spec, TrainConfig(1, 1, 1e-3, 0, 1, "fp16"), TEXT, tokenizer, tmp_path)
    checkpoint = torch.load(tmp_path / "final_model.pt", weights_only=True)
    linear = {
        **{f"h.0.attn.{name}": (rows, 32) for name, rows in projections.items()},
        "h.0.attn.c_proj": (32, 32),
        "h.0.mlp.c_fc": (128, 32),
        "h.0.mlp.c_proj": (32, 128),
    }
    expected = {"wte.weight": (320, 32), "wpe.weight": (16, 32)}
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        expected |= {f"{name}.weight": (32,), f"{name}.bias": (32,)}
    for name, shape in linear.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    found = checkpoint["model_state_dict"]
    assert {name: tuple(t.shape) for name, t in found.items()} == expected
    assert {t.dtype for t in found.values()} == {torch.float16}
    assert checkpoint["model_config"] == {
        "vocab_size": 320,
        "n_positions": 16,
        "n_layer": 1,
        "n_embd": 32,
        "n_head": 4,
        "n_inner": 128,
        "layer_norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
        **({} if groups == 4 else {"n_kv_groups": groups}),
    }
    assert (checkpoint["step"], checkpoint["tokens_seen"]) == (1, 4)
    # The importer and our own inverse agree, so nothing was dropped or reordered.
    ours = load_any(tmp_path / "final_model.pt")
    assert ours.spec.label == spec.label
    again, _ = load(tmp_path / "checkpoint.pt")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor.half().float(), ours.state_dict()[name]), name


def test_rows_of_fused_projections_are_in_the_papers_order() -> None:
    spec = ModelSpec(16, 8, 1, 2, 2, 4, 8, 8, 0.5)
    state = {n: torch.full(s, 0.0) for n, s in spec.parameter_shapes().items()}
    for value, name in enumerate(("q_proj", "k_proj", "v_proj"), start=1):
        state[f"h.0.attn.{name}.bias"].fill_(value)
    assert (
        to_paper_state(spec, state)["h.0.attn.c_attn.bias"].tolist()
        == [1.0] * 8 + [2.0] * 8 + [3.0] * 8
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sharing", "identity"], "allowed: none, q=k, k=v, q=k=v"),
        (["--sharing", "q=k", "--kv-heads", 2], "needs as many key as query heads"),
        (["--kv-heads", 3], "it must divide --heads 4"),
        (["--context", 5000], "the text is too short"),
        (["--vocab-size", 100], "at least the 256 bytes"),
        (["--lr", 1e30], "is too high"),
        (["--lr", -1], "must be positive"),
        (["--steps", 0], "--steps is '0': it should be greater than or equal to 1"),
        (["--dtype", "int3"], "allowed: fp32, fp16"),
        (["--tokenizer", "absent.json"], "does not exist"),
        (["--resume"], "has no checkpoint.pt"),
    ],
)
def test_wrong_flags_end_in_one_line_and_no_output(
    flags: list[object], words: str, text: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "out"
    usual = zip([*TINY[::2], "--steps"], [*TINY[1::2], 5], strict=True)
    tiny = [word for pair in usual if pair[0] not in flags for word in pair]
    error = fails(monkeypatch, capsys, "--text", text, "-o", out, *tiny, *flags)
    assert words in error
    assert not out.exists()


def test_wrong_files_end_in_one_line(
    text: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "out"
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Grüße".encode("latin-1"))
    assert "not UTF-8" in fails(monkeypatch, capsys, "--text", latin, "-o", out, *TINY)
    assert "absent.txt" in fails(monkeypatch, capsys, "--text", tmp_path / "absent.txt", "-o", out)
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "empty.txt is empty" in fails(monkeypatch, capsys, "--text", empty, "-o", out, *TINY)
    command(monkeypatch, "--text", text, "-o", out, *TINY, "--steps", 2)
    flags = ["--text", text, "-o", out, *TINY]
    assert "not empty" in fails(monkeypatch, capsys, *flags, "--steps", 2)
    error = fails(monkeypatch, capsys, *flags, "--steps", 2, "--lr", 0.1, "--resume")
    assert "lr is 0.1" in error
    assert "started with 0.002" in error
    assert "already done 2" in fails(monkeypatch, capsys, *flags, "--steps", 1, "--resume")
    checkpoint = out / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert "damaged" in fails(monkeypatch, capsys, *flags, "--steps", 2, "--resume")


NAMES = {"kjv-qkv": "QKV", "kjv-q-kv": "Q-K=V", "kjv-q-gqa2": "Q-GQA-2", "kjv-q-mqa": "Q-MQA"}


def test_shipped_checkpoints_are_small_and_all_there() -> None:
    files = {p.stem: p.stat().st_size for p in SHIPPED.glob("*.pt")}
    assert files.keys() == NAMES.keys()
    assert sum(files.values()) <= 12_000_000
    assert (SHIPPED / "held_out.txt").stat().st_size <= 60_000


@pytest.mark.parametrize("name", NAMES)
def test_shipped_checkpoint_has_the_perplexity_the_readme_states(name: str) -> None:
    checkpoint = torch.load(SHIPPED / f"{name}.pt", weights_only=True)
    model = load_any(SHIPPED / f"{name}.pt")  # the importer infers the variant
    assert model.spec.label == NAMES[name]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    assert tokenizer.get_vocab_size() < model.spec.vocab_size  # spare logits exist
    readme = (SHIPPED / "README.md").read_text("utf-8")
    row = re.search(rf"^\| `{name}\.pt` \|(.*)\|$", readme, re.MULTILINE)
    assert row
    cells = [cell.strip() for cell in row[1].split("|")]
    stated_full, stated_sample = (float(cell) for cell in cells[-2:])
    assert checkpoint["val_metrics"]["perplexity"] == pytest.approx(stated_full, abs=0.005)
    sample = (SHIPPED / "held_out.txt").read_text("utf-8")
    assert evaluate(model, tokenizer, sample)["perplexity"] == pytest.approx(
        stated_sample, abs=0.01
    )
