"""``edgeqkv init``: a model of a preset's shape with random weights, for size and speed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    preset: Annotated[str, typer.Option(help="Shape, e.g. 300m-q-k=v; a wrong name lists all.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="MODEL_DIR to write.")],
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the weights.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace MODEL_DIR if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a randomly initialised float32 model (GPT-2's initialisation), to measure size and speed.

    Example: edgeqkv init --preset 300m-q-mqa -o MODEL_DIR --seed 0
    """
    from edgeqkv import __version__, presets
    from edgeqkv.console import print_json, progress
    from edgeqkv.errors import of_flag
    from edgeqkv.files import refuse_existing

    with of_flag("--preset"):
        spec = presets.preset(preset)
    refuse_existing(output, overwrite)

    import torch

    from edgeqkv.model import Decoder
    from edgeqkv.model_dir import save_model_dir
    from edgeqkv.train import initialise

    provenance = {
        "source": f"preset {preset}",
        "source_format": "random initialisation: not trained",
        "inferences": [],
        "seed": seed,
        "edgeqkv_version": __version__,
    }
    with progress(2, "init") as step:
        with torch.device("meta"):
            decoder = Decoder(spec)
        decoder.to_empty(device="cpu")  # the only copy: safetensors writes from it in place
        for module in decoder.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.reset_parameters()
        initialise(decoder, seed)
        step("weights drawn")
        save_model_dir(output, spec, decoder.state_dict(), provenance, overwrite=overwrite)
        step("written")
    parameters = spec.num_parameters()
    if as_json:
        print_json({"output": str(output), "label": spec.label, "parameters": parameters})
    else:
        print(f"variant   {spec.label}, {parameters:,} parameters, random (seed {seed})")
        print(f"written   {output}")
