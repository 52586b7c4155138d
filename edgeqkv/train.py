"""Train a small decoder of any variant on one text file, resumably, into a checkpoint of the papers' format."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from edgeqkv.console import note, progress
from edgeqkv.corpus import split
from edgeqkv.errors import CheckpointError, TextError, UnsupportedError, UsageError
from edgeqkv.interrupts import heard
from edgeqkv.model import Decoder
from edgeqkv.paper_checkpoint import from_paper_state, paper_config, to_paper_state
from edgeqkv.perplexity import evaluate, logits
from edgeqkv.spec import ModelSpec
from edgeqkv.tokenizer import TOKENIZER

CHECKPOINT = "checkpoint.pt"  # weights and optimizer, float32: what --resume continues from
FINAL = "final_model.pt"  # weights and val_metrics, as the papers' code names them
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train. ``batch`` counts sequences, ``save_every`` optimizer steps."""

    steps: int
    batch: int
    lr: float
    seed: int
    save_every: int
    dtype: str = "fp32"


def initialise(model: Decoder, seed: int) -> None:
    """GPT-2's: normal 0.02 (positions 0.01), residual projections smaller by sqrt(2 layers),
    biases 0, norms 1."""
    generator = torch.Generator().manual_seed(seed)
    residual = 0.02 / math.sqrt(2 * model.spec.num_hidden_layers)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                std = residual if name.endswith(("o_proj.weight", "mlp.c_proj.weight")) else 0.02
                std = 0.01 if name == "wpe.weight" else std
                p.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                p.zero_()


def window_length(config: TrainConfig, context: int, step: int) -> int:
    """A quarter of the context at first, the whole context for the last tenth of the steps.

    Short windows cost a fifth of the time and, while the model learns words, teach as much.
    """
    return context if step >= config.steps * 0.9 else max(1, context // 4)


def batch_of(ids: Tensor, context: int, config: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
    """Random windows [batch, S + 1] of the text and the positions [S], at random too, to read them at.

    A function of the step alone, so resuming needs no random state.
    """
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    length = window_length(config, context, step)
    starts = torch.randint(len(ids) - context, (config.batch,), generator=generator).tolist()
    shift = int(torch.randint(context - length + 1, (1,), generator=generator))
    windows = torch.stack([ids[s : s + length + 1] for s in starts])
    return windows, torch.arange(shift, shift + length)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine down to a tenth."""
    warmup = max(1, config.steps // 20)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def save_atomically(data: Any, path: Path) -> None:
    """torch.save beside ``path``, then rename: a kill or a full disk leaves the old file whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        torch.save(data, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Ctrl-C only fills the yielded list, so that training stops between steps; a second one kills.

    So does SIGTERM where the command line treats it as Ctrl-C.
    """
    seen: list[int] = []

    def hear(number: int, usual: Callable[[], Any]) -> None:
        if seen:
            usual()
        seen.append(number)

    with heard(hear):
        yield seen


def start_or_resume(
    model: Decoder, optimizer: torch.optim.Optimizer, path: Path, settings: Mapping[str, Any]
) -> tuple[int, int]:
    """Load what ``path``, when it exists, holds into model and optimizer -> (steps done, tokens seen).

    ``steps`` may differ from the saved run's: from here on the schedule is that of the new number.
    """
    if not path.exists():
        return 0, 0
    try:
        saved = torch.load(path, weights_only=True)
        state, moments = saved["model_state_dict"], saved["optimizer_state_dict"]
        step, seen = int(saved["step"]), int(saved["tokens_seen"])
        found = {**saved["model_config"], **saved["train_config"]}
    except Exception as e:
        first = str(e).split("\n")[0]
        raise CheckpointError(f"{path} is damaged or not a training checkpoint: {first}") from None
    for key in sorted((settings.keys() | found.keys()) - {"steps", "save_every", "dtype"}):
        if settings.get(key) != found.get(key):
            raise UsageError(
                f"--resume: {key} is {settings.get(key)!r}, {path} was started with {found.get(key)!r}; "
                "repeat the original flags or choose another output"
            )
    if step > settings["steps"]:
        raise UsageError(f"--steps is {settings['steps']}; {path} has already done {step}")
    model.load_state_dict(from_paper_state(model.spec, state))
    optimizer.load_state_dict(moments)
    return step, seen


def train(
    spec: ModelSpec, config: TrainConfig, text: str, tokenizer: Tokenizer, out: Path
) -> dict[str, Any]:
    """Train and write ``out``/final_model.pt; continues ``out``/checkpoint.pt when there is one.

    Equal seed, flags and thread count give equal weights, interrupted or not.

    Raises:
        TextError: the text is too short.
        UsageError: the loss is not finite, or a resumed run's flags differ.
        CheckpointError: ``out``/checkpoint.pt is damaged.
        KeyboardInterrupt: after Ctrl-C, with the current step saved.
    """
    if spec.query_mode != "projected" or not spec.is_causal:
        raise UnsupportedError(f"{spec.label} cannot be trained here: only causal models with W_Q")
    context = spec.max_position_embeddings
    train_text, held_out = split(text)
    ids, held_out_ids = (
        torch.tensor(tokenizer.encode(part, add_special_tokens=False).ids)
        for part in (train_text, held_out)
    )
    if len(ids) <= context or len(held_out_ids) < 2:
        raise TextError(
            f"the text is too short: {len(ids)} tokens to train on and {len(held_out_ids)} held out; "
            f"needed: {context + 1} and 2; give a longer text or a smaller --context"
        )
    model = Decoder(spec)
    initialise(model, config.seed)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.99), fused=True)
    train_config = {
        **dataclasses.asdict(config),
        "qkv_sharing": spec.qkv_sharing,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
    }
    path = out / CHECKPOINT
    first, seen = start_or_resume(model, optimizer, path, {**paper_config(spec), **train_config})

    def common(step: int, dtype: torch.dtype) -> dict[str, Any]:
        state = {k: v.detach().to(dtype) for k, v in model.state_dict().items()}
        return {
            "step": step,
            "epoch": seen // len(ids),
            "tokens_seen": seen,
            "model_state_dict": to_paper_state(spec, state),
            "model_config": paper_config(spec),
            "train_config": train_config,
        }

    def save(step: int) -> None:
        if not path.exists():
            out.mkdir(parents=True, exist_ok=True)
            tokenizer.save(str(out / TOKENIZER))
        save_atomically(
            {**common(step, torch.float32), "optimizer_state_dict": optimizer.state_dict()}, path
        )

    every = max(1, config.steps // 100)
    losses: list[float] = []
    seconds: list[float] = []
    with (
        deferred_interrupt() as interrupted,
        progress(-(-(config.steps - first) // every), f"train {spec.label}") as advance,
    ):
        for step in range(first, config.steps):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            windows, positions = batch_of(ids, context, config, step)
            predicted = logits(model, windows[:, :-1], positions).flatten(0, 1)
            loss = F.cross_entropy(predicted, windows[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
                raise UsageError(
                    f"the loss is {loss.item()} at step {step} (gradient norm {norm.item()}); "
                    f"--lr {config.lr} is too high, try {config.lr / 4:g}"
                )
            optimizer.step()
            losses.append(loss.item())
            seen += len(positions) * config.batch
            seconds.append(time.perf_counter() - began)
            done = step + 1
            stop = bool(interrupted)  # read once: a signal after the save waits for the next step
            if done % config.save_every == 0 or done == config.steps or stop:
                save(done)
            if (done - first) % every == 0 or done == config.steps:
                advance(f"step {done}, loss {statistics.fmean(losses[-every:]):.3f}")
            if stop and done < config.steps:
                note(f"stopped after step {done} of {config.steps}; --resume continues")
                signal.raise_signal(interrupted[0])  # the second one, which ends it as usual

    final = common(config.steps, DTYPES[config.dtype])
    model.load_state_dict(
        {k: v.float() for k, v in from_paper_state(spec, final["model_state_dict"]).items()}
    )
    metrics = evaluate(model, tokenizer, held_out)  # of the weights as stored
    save_atomically({**final, "val_metrics": metrics}, out / FINAL)
    return {
        "checkpoint": os.fspath(out / FINAL),
        "variant": spec.label,
        "parameters": spec.num_parameters(),
        "train_tokens": len(ids),
        "train_loss": statistics.fmean(losses[-every:]) if losses else None,
        "seconds_per_step": statistics.median(seconds) if seconds else None,
        **{f"held_out_{k}": v for k, v in metrics.items()},
    }
