"""``edgeqkv import``: a checkpoint of the papers' code becomes a MODEL_DIR."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from edgeqkv.spec import ModelSpec


def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Checkpoint file, Hugging Face GPT-2 folder, hf:OWNER/NAME or hf:OWNER/NAME/FILE.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="MODEL_DIR to write.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="byte, tokenizer.json, or a folder with it or vocab.json + merges.txt. "
            "(default: what a folder SRC has)"
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace MODEL_DIR if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Read a trained checkpoint; write config.json, model.safetensors and, if given, tokenizer.json.

    Example: edgeqkv import final_model.pt -o MODEL_DIR --tokenizer byte
    """
    from edgeqkv import __version__
    from edgeqkv.console import print_json
    from edgeqkv.files import refuse_existing
    from edgeqkv.importers import read_checkpoint
    from edgeqkv.model_dir import save_model_dir
    from edgeqkv.tokenizer import has_tokenizer, load_tokenizer

    refuse_existing(output, overwrite)
    if tokenizer is None and has_tokenizer(Path(source)):
        tokenizer = source
    codec = load_tokenizer(tokenizer) if tokenizer is not None else None
    imported = read_checkpoint(source)
    spec, inferences = imported.spec, list(imported.inferences)
    if codec is not None:
        spec = _with_tokenizer(spec, codec, str(tokenizer))
        inferences = [i for i in inferences if not i.startswith("num_used_tokens ")]
        inferences.append(f"num_used_tokens {spec.used_tokens}: the size of the tokenizer")
    provenance = {
        "source": source,
        "source_format": imported.source_format,
        "inferences": inferences,
        "edgeqkv_version": __version__,
    }
    save_model_dir(
        output,
        spec,
        imported.state,
        provenance,
        tokenizer_json=codec.to_str() if codec is not None else None,
        overwrite=overwrite,
    )
    if as_json:
        print_json(
            {
                "output": str(output),
                "label": spec.label,
                "parameters": spec.num_parameters(),
                "tokenizer": tokenizer,
                **provenance,
                "spec": spec.to_dict(),
            }
        )
        return
    print(f"format    {imported.source_format}")
    print(f"variant   {spec.label}, {spec.num_parameters():,} parameters")
    for inference in inferences:
        print(f"inferred  {inference}")
    print(f"written   {output}")


def _with_tokenizer(spec: ModelSpec, codec: Tokenizer, name: str) -> ModelSpec:
    """The spec whose ids beyond the tokenizer's are spare: they are never sampled."""
    import dataclasses

    from edgeqkv.errors import CheckpointError
    from edgeqkv.tokenizer import num_tokens

    tokens = num_tokens(codec)
    if tokens > spec.vocab_size:
        raise CheckpointError(
            f"tokenizer {name!r} has {tokens} tokens, the model has embeddings for "
            f"{spec.vocab_size}; give the tokenizer the model was trained with"
        )
    return dataclasses.replace(spec, num_used_tokens=tokens if tokens < spec.vocab_size else None)
