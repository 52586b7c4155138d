"""``edgeqkv export``: a checkpoint becomes verified bundles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from edgeqkv.spec import ModelSpec
    from export.lowering import Request

# What a backend keeps its cache in unless told otherwise: Core ML states exist only in fp16.
DEFAULT_CACHE_DTYPE = {"coreml": "fp16"}


def run(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="From `edgeqkv import`.")],
    out: Annotated[Path, typer.Option("-o", "--output", help="Bundles go to OUT/<backend>.")],
    backends: Annotated[str, typer.Option("-b", "--backend", help="Comma list.")] = (
        "onnx,executorch,coreml"
    ),
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of context [default: the model's positions].")
    ] = None,
    cache_layout: Annotated[
        str, typer.Option(help="auto: one tensor per layer where exact; shared; separate.")
    ] = "auto",
    cache_dtype: Annotated[
        str | None, typer.Option(help="fp32 or fp16 [default: fp32; coreml fp16].")
    ] = None,
    onnx_attention: Annotated[str, typer.Option(help="auto, gemm or gqa.")] = "auto",
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
    from edgeqkv.files import refuse_existing
    from export.pipeline import STAGES, export_bundle, find_backend

    options = {
        "onnx": {"onnx_attention": onnx_attention},
        "executorch": {"et_attention": et_attention},
        "coreml": {"coreml_precision": coreml_precision},
    }
    spec = _read_spec(model)
    requests = {
        name: _request(spec, cache_layout, cache_dtype, max_context, name, options.get(name, {}))
        for name in _split(backends)
    }
    for name, request in requests.items():  # everything is refused before anything is traced
        find_backend(name).check(request)
        if not dry_run:
            refuse_existing(out / name, overwrite)
    rows: list[dict[str, Any]] = []
    if dry_run:
        rows = [_row(name, out / name, r.cache, None) for name, r in requests.items()]
    else:
        import torch

        from edgeqkv.model_dir import TOKENIZER, load_any
        from export.golden import make_golden

        with torch.inference_mode(), progress(2 + len(requests) * len(STAGES), "export") as step:
            decoder = load_any(model)
            step("model loaded")
            context = min(r.cache.capacity for r in requests.values())
            golden = make_golden(decoder, context)
            step("reference logits")
            tokenizer = model / TOKENIZER
            for name, request in requests.items():
                artifact = export_bundle(
                    decoder,
                    golden,
                    name,
                    request,
                    out / name,
                    name=model.resolve().name,
                    tokenizer=tokenizer if tokenizer.is_file() else None,
                    overwrite=overwrite,
                    verify=verify,
                    report=lambda stage, name=name: step(f"{name} {stage}"),  # type: ignore[misc]
                )
                rows.append(_row(name, out / name, artifact.cache, artifact))
    if as_json:
        print_json(rows)
        return
    columns = [
        "backend",
        "layout",
        "cache",
        "context",
        "bytes/token",
        "formulation",
        "MB",
        "bundle",
    ]
    keys = ["backend", "layout", "cache_dtype", "capacity", "bytes_per_token", "formulation"]
    cells = [[r[k] for k in keys] + [_megabytes(r["nbytes"]), r["bundle"]] for r in rows]
    print_table(columns, cells, title="plan, nothing written" if dry_run else None)


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


def _request(
    spec: ModelSpec,
    layout: str,
    dtype: str | None,
    context: int | None,
    backend: str,
    options: dict[str, str],
) -> Request:
    from edgeqkv.cache import cache_spec
    from export.lowering import Request

    dtype = dtype or DEFAULT_CACHE_DTYPE.get(backend, "fp32")
    cache = cache_spec(spec, layout=layout, dtype=dtype, capacity=context)
    return Request(model=spec, cache=cache, options=options)


def _row(backend: str, bundle: Path, cache: Any, artifact: Any) -> dict[str, Any]:
    return {
        "backend": backend,
        "bundle": str(bundle),
        "layout": cache.layout,
        "cache_dtype": cache.dtype,
        "capacity": cache.capacity,
        "bytes_per_token": cache.bytes_per_token,
        "formulation": artifact.formulation if artifact else None,
        "nbytes": artifact.nbytes if artifact else None,
    }


def _megabytes(nbytes: int | None) -> str | None:
    return None if nbytes is None else f"{nbytes / 1e6:.2f}"
