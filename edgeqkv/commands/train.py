"""edgeqkv train"""

from __future__ import annotations

from pathlib import Path

import typer


def run(
    text: Path = typer.Option(..., "--text", help="UTF-8 text; its last 5 % is held out."),
    output: Path = typer.Option(
        ..., "-o", "--output", help="Folder for checkpoints and tokenizer."
    ),
    sharing: str = typer.Option("k=v", help="Shared projections: none, q=k, k=v or q=k=v."),
    kv_heads: int | None = typer.Option(None, min=1, help="Key/value heads (default: --heads)."),
    layers: int = typer.Option(4, min=1, help="Layers."),
    hidden: int = typer.Option(128, min=1, help="Hidden size; the MLP is four times as wide."),
    heads: int = typer.Option(4, min=1, help="Query heads."),
    context: int = typer.Option(1024, min=1, help="Positions the model learns."),
    vocab_size: int = typer.Option(1000, help="Tokens of the BPE trained on the text."),
    tokenizer: str | None = typer.Option(None, help="Instead: byte, tokenizer.json or its folder."),
    steps: int = typer.Option(5000, min=1, help="Optimizer steps."),
    batch: int = typer.Option(1, min=1, help="Sequences per step."),
    lr: float = typer.Option(2e-3, help="Peak learning rate."),
    seed: int = typer.Option(
        0, min=0, max=2**32 - 1, help="Of the weights and of the order of the text."
    ),
    save_every: int = typer.Option(100, min=1, help="Steps between resumable checkpoints."),
    resume: bool = typer.Option(False, "--resume", help="Continue OUTPUT/checkpoint.pt."),
    dtype: str = typer.Option("fp32", help="Of the weights in final_model.pt: fp32 or fp16."),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Train a small model of any variant on a text file; writes a checkpoint `edgeqkv import` reads.

    Example: edgeqkv train --text book.txt --sharing k=v --kv-heads 1 -o runs/q-mqa
    """
    from edgeqkv import console
    from edgeqkv.corpus import padded, read_text, split, train_tokenizer
    from edgeqkv.errors import CheckpointError, TextError, UsageError, of_flag
    from edgeqkv.files import check_writable
    from edgeqkv.spec import QKV_SHARINGS, ModelSpec
    from edgeqkv.tokenizer import load_tokenizer, num_tokens
    from edgeqkv.train import (
        CHECKPOINT,
        DTYPES,
        TrainConfig,
        train,
    )

    if sharing not in QKV_SHARINGS:
        raise UsageError(
            f"--sharing is {sharing!r}; allowed: {', '.join(QKV_SHARINGS)} "
            "(query modes other than projected cannot be trained here)"
        )
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    if not 0 < lr < float("inf"):
        raise UsageError(f"--lr is {lr}; it must be positive")
    if hidden % heads:
        raise UsageError(f"--heads is {heads}; it must divide --hidden {hidden}")
    if kv_heads is not None and heads % kv_heads:
        raise UsageError(f"--kv-heads is {kv_heads}; it must divide --heads {heads}")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; the output is a folder, choose another name")
    started = (output / CHECKPOINT).exists()
    if resume and not started:
        raise CheckpointError(f"--resume: {output} has no {CHECKPOINT}; start without --resume")
    if not resume and output.exists() and any(output.iterdir()):
        raise UsageError(
            f"{output} is not empty; choose another output"
            + (" or give --resume to continue" if started else "")
        )
    check_writable(output)

    content = read_text(text)
    if resume and tokenizer is None:
        tokenizer = str(output)
    if tokenizer is None:
        known = train_tokenizer(split(content)[0], vocab_size)
    else:
        known = load_tokenizer(tokenizer)
    used = num_tokens(known)
    with of_flag("--sharing"):  # all else was checked
        spec = ModelSpec(
            vocab_size=padded(used),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,
            head_dim=hidden // heads,
            intermediate_size=4 * hidden,
            max_position_embeddings=context,
            attention_scale=(hidden // heads) ** -0.5,
            qkv_sharing=sharing,
            num_used_tokens=used,
        )
    config = TrainConfig(steps, batch, lr, seed, save_every, dtype)
    try:
        result = train(spec, config, content, known, output)
    except TextError as e:
        raise TextError(f"--text {text}: {e}") from None
    if json:
        console.print_json(result)
        return
    console.print_table(
        ("", ""),
        [
            (key.replace("_", " "), f"{v:.4g}" if isinstance(v, float) else v)
            for key, v in result.items()
        ],
    )
