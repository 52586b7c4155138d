"""``edgeqkv export``: a checkpoint becomes verified bundles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from edgeqkv.artifact import Artifact
    from edgeqkv.cache import CacheSpec
    from edgeqkv.quant import QuantRecipe
    from edgeqkv.spec import ModelSpec
    from export.lowering import Request

# What a backend keeps its cache in unless told otherwise: Core ML states exist only in fp16.
DEFAULT_CACHE_DTYPE = {"coreml": "fp16"}
COLUMNS = {
    "backend": "backend",
    "stored_weights": "weights",
    "layout": "layout",
    "cache_dtype": "cache",
    "capacity": "context",
    "bytes_per_token": "bytes/token",
    "formulation": "formulation",
}
# Options of one backend, and what they may be, first their value when not given.
OWN = {
    "--onnx-attention": ("onnx", ("auto", "gemm", "gqa")),
    "--io": ("onnx", ("edgeqkv", "optimum")),
    "--et-attention": ("executorch", ("auto", "plain", "custom")),
    "--coreml-precision": ("coreml", ("fp16", "fp32")),
}


def run(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="From `edgeqkv import`.")],
    out: Annotated[Path, typer.Option("-o", "--output", help="Bundles go to OUT/<backend>.")],
    backends: Annotated[str, typer.Option("-b", "--backend", help="Comma list.")] = (
        "onnx,executorch,coreml"
    ),
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of context (default: the model's positions).")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="fp32, fp16, int8 or int4 (default: fp32).")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Columns per scale, 0 for a whole row (default: int4 32, int8 0)."),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="TOML", help="Number format per module, not --weights.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text that GPTQ and --cache-rotate fit to."),
    ] = None,
    cache_rotate: Annotated[
        bool, typer.Option(help="Store the cache in a basis that rounds better (exact).")
    ] = False,
    cache_layout: Annotated[
        str, typer.Option(help="auto: one tensor per layer where exact; shared; separate.")
    ] = "auto",
    cache_dtype: Annotated[
        str | None, typer.Option(help="fp32, fp16 or int8 (default: fp32; coreml fp16).")
    ] = None,
    onnx_attention: Annotated[str, typer.Option(help="auto, gemm or gqa.")] = "auto",
    io: Annotated[
        str, typer.Option(help="ONNX inputs and outputs: edgeqkv, or optimum for transformers.")
    ] = "edgeqkv",
    et_attention: Annotated[str, typer.Option(help="auto, plain or custom.")] = "auto",
    coreml_precision: Annotated[str, typer.Option(help="fp16 or fp32 compute.")] = "fp16",
    verify: Annotated[bool, typer.Option(help="Run each bundle against the model.")] = True,
    dry_run: Annotated[bool, typer.Option(help="Check and show the plan, write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace bundles that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Lower MODEL_DIR to one bundle per backend, with one cache tensor per layer where exact.

    Example: edgeqkv export MODEL_DIR -b onnx,executorch -o OUT --max-context 1024
    """
    from edgeqkv.console import print_json, print_table, progress
    from edgeqkv.errors import of_flag
    from edgeqkv.files import refuse_existing
    from edgeqkv.quant import GROUPED, Quantisation
    from edgeqkv.tokenizer import TOKENIZER, load_tokenizer
    from export.lowering import Request
    from export.pipeline import STAGES, export_bundle, find_backend
    from export.rotate import check_rotation

    options = {
        "onnx": {"onnx_attention": onnx_attention, "onnx_io": io},
        "executorch": {"et_attention": et_attention},
        "coreml": {"coreml_precision": coreml_precision},
    }
    names = _split(backends)
    own = (onnx_attention, io, et_attention, coreml_precision)
    _check_own(dict(zip(OWN, own, strict=True)), names)
    for name in names:
        find_backend(name)
    spec = _read_spec(model)
    quantisation = Quantisation(_recipe(spec, weights, group_size, recipe))
    if cache_rotate:
        with of_flag("--cache-rotate"):
            check_rotation(spec)
    needless = not cache_rotate and not quantisation.recipe.schemes & set(GROUPED)
    calibration = [] if calibrate is None else _calibration(model, spec, calibrate, needless)
    requests = {
        name: Request(
            model=spec,
            cache=_cache(spec, cache_layout, cache_dtype, max_context, name),
            recipe=quantisation.recipe,
            options=options.get(name, {}),
        )
        for name in names
    }
    for name, request in requests.items():  # everything is refused before anything is traced
        with of_flag("-b"):
            find_backend(name).check(request)
        if not dry_run:
            refuse_existing(out / name, overwrite)
    tokenizer = model / TOKENIZER
    if tokenizer.is_file():
        load_tokenizer(tokenizer)  # a broken one would be found by the bundle's users
    rows: list[dict[str, Any]] = []
    if dry_run:
        rows = [_row(name, out / name, r, None) for name, r in requests.items()]
    else:
        import torch

        from edgeqkv.model_dir import load_any
        from export.calibrate import prepare
        from export.golden import make_golden
        from export.quantise import drop_floats
        from export.verify import make_reference

        steps = 3 + len(requests) * (len(STAGES) if verify else len(STAGES) - 1)
        gptq = calibration and quantisation.recipe.schemes & set(GROUPED)
        steps += 1 + spec.num_hidden_layers if gptq else 0
        with (
            torch.inference_mode(),
            progress(steps, f"export {model.resolve().name}", ahead=True) as step,
        ):
            step("read the model")
            decoder = load_any(model)
            step("prepare the weights")
            tensors, quantisation = prepare(
                decoder,
                quantisation.recipe,
                text=calibrate,
                ids=calibration,
                rotate=cache_rotate,
                report=step,
            )
            step("reference logits")
            context = min(r.cache.capacity for r in requests.values())
            with of_flag("--max-context"):
                golden = make_golden(decoder, context)
            reference = make_reference(decoder, context) if verify else None
            drop_floats(decoder, tensors)
            for name, request in requests.items():
                artifact = export_bundle(
                    decoder,
                    golden,
                    name,
                    dataclasses.replace(request, tensors=tensors),
                    out / name,
                    name=model.resolve().name,
                    quantisation=quantisation,
                    tokenizer=tokenizer if tokenizer.is_file() else None,
                    overwrite=overwrite,
                    reference=reference,
                    report=lambda stage, name=name: step(f"{name} {stage}"),  # type: ignore[misc]
                )
                rows.append(_row(name, out / name, request, artifact))
    if as_json:
        print_json(rows)
        return
    cells = [[r[key] for key in COLUMNS] + [_megabytes(r["nbytes"])] for r in rows]
    title = "plan, nothing written" if dry_run else f"bundles in {out}"
    print_table([*COLUMNS.values(), "MB"], cells, title=title)


def _check_own(given: Mapping[str, str], backends: list[str]) -> None:
    from edgeqkv.errors import UsageError

    for flag, value in given.items():
        backend, allowed = OWN[flag]
        if value not in allowed:
            raise UsageError(f"{flag} is {value!r}; allowed: {', '.join(allowed)}")
        if value != allowed[0] and backend not in backends:
            raise UsageError(f"{flag} {value} is for {backend}; -b has {','.join(backends)}")


def _split(backends: str) -> list[str]:
    from edgeqkv.errors import UsageError

    names = [b.strip() for b in backends.split(",") if b.strip()]
    if not names:
        raise UsageError("-b names no backend; example: -b onnx,executorch")
    return list(dict.fromkeys(names))


def _read_spec(model: Path) -> ModelSpec:
    """The spec alone when it is a MODEL_DIR, so that wrong requests fail within a second."""
    from edgeqkv.errors import CheckpointError
    from edgeqkv.model_dir import read_config

    if not model.exists():
        raise CheckpointError(f"{model} does not exist; make it with `edgeqkv import SRC -o DIR`")
    if not model.is_dir():
        raise CheckpointError(
            f"{model} is a file; convert it first with `edgeqkv import {model} -o MODEL_DIR`"
        )
    return read_config(model)[0]


def _recipe(
    spec: ModelSpec, weights: str | None, group_size: int | None, path: Path | None
) -> QuantRecipe:
    """What the flags ask for, checked against the shapes of the model.

    Raises:
        UsageError: flags that contradict each other or the model.
        SpecError, UnsupportedError: a recipe file that is missing, malformed, or not of the model.
    """
    from edgeqkv.errors import UsageError, of_flag
    from edgeqkv.quant import SCHEMES, check_groups, read_recipe, uniform

    if path is not None and (weights is not None or group_size is not None):
        flag = "--group-size" if weights is None else "--weights"
        raise UsageError(f"--recipe says how every weight is stored; leave {flag} away")
    if path is not None:
        recipe = read_recipe(path, spec)
        check_groups(spec, recipe)
        return recipe
    weights = "fp32" if weights is None else weights
    with of_flag("--group-size" if weights in SCHEMES else "--weights"):
        recipe = uniform(weights, group_size)
        check_groups(spec, recipe)
    return recipe


def _calibration(model: Path, spec: ModelSpec, text: Path, needless: bool) -> list[int]:
    """Token ids of the calibration text.

    Raises:
        UsageError: nothing to calibrate. TextError, CheckpointError: no such text or tokenizer.
    """
    from edgeqkv.corpus import encode_file
    from edgeqkv.errors import UsageError
    from export.calibrate import LEAST

    if needless:
        raise UsageError(
            "--calibrate chooses integers and the cache's basis; give --weights int4 or int8, or "
            "--cache-rotate"
        )
    return encode_file(text, model, spec.used_tokens, least=LEAST)


def _cache(
    spec: ModelSpec, layout: str, dtype: str | None, context: int | None, backend: str
) -> CacheSpec:
    from edgeqkv.cache import cache_spec
    from edgeqkv.errors import of_flag

    dtype = DEFAULT_CACHE_DTYPE.get(backend, "fp32") if dtype is None else dtype
    with of_flag("--cache-layout"):
        cache_spec(spec, layout=layout)
    with of_flag("--cache-dtype"):
        cache_spec(spec, dtype=dtype)
    with of_flag("--max-context"):
        return cache_spec(spec, layout=layout, dtype=dtype, capacity=context)


def _row(backend: str, bundle: Path, request: Request, artifact: Artifact | None) -> dict[str, Any]:
    cache = request.cache
    return {
        "backend": backend,
        "bundle": str(bundle),
        "weights": request.weights,
        "stored_weights": artifact.stored_weights if artifact else _planned(request),
        "layout": cache.layout,
        "cache_dtype": cache.dtype,
        "capacity": cache.capacity,
        "bytes_per_token": cache.bytes_per_token,
        "formulation": artifact.formulation if artifact else None,
        "nbytes": artifact.nbytes if artifact else None,
    }


def _planned(request: Request) -> str:
    """What Artifact.stored_weights will be."""
    from edgeqkv.quant import GROUPED

    floats = not request.recipe.schemes & set(GROUPED)
    return request.options.get("coreml_precision", request.weights) if floats else request.weights


def _megabytes(nbytes: int | None) -> str | None:
    return None if nbytes is None else f"{nbytes / 1e6:.2f}"
