"""MODEL_DIR -> bundle: check, lower, golden vectors, manifest, verify; whole or not at all."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

from edgeqkv import __version__
from edgeqkv.artifact import (
    MANIFEST,
    TOKENIZER,
    Artifact,
    Golden,
    file_entry,
    write_golden,
    write_manifest,
)
from edgeqkv.errors import MismatchError, UsageError
from edgeqkv.files import new_folder
from edgeqkv.model import Decoder
from edgeqkv.quant import Quantisation
from export.lowering import Backend, Request
from export.verify import Reference, verify_bundle

BACKENDS = ("onnx", "executorch", "coreml")
STAGES = ("lower", "hash", "verify")


def find_backend(name: str) -> Backend:
    """The module ``export.backends.to_<name>``.

    Raises:
        UsageError: there is no such module.
    """
    module = f"export.backends.to_{name}"
    try:
        return cast(Backend, importlib.import_module(module))
    except ModuleNotFoundError as e:
        if not module.startswith(str(e.name)):  # a part of it, where a name has dots
            raise
        raise UsageError(f"-b is {name!r}; allowed: {', '.join(BACKENDS)}") from None


def export_bundle(
    decoder: Decoder,
    golden: Golden,
    backend: str,
    request: Request,
    target: Path,
    *,
    name: str,
    quantisation: Quantisation | None = None,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    reference: Reference | None = None,
    report: Callable[[str], None] = lambda stage: None,
) -> Artifact:
    """Write one bundle to ``target``; ``report`` hears each of STAGES as it begins.

    ``golden`` and ``reference`` are of the rounded weights (``export.quantise.apply_rounding``) where
    ``request.tensors`` holds integers; ``quantisation`` says how those were made. There ``decoder``
    may be without its floats (``drop_floats``). Without ``reference`` the bundle is not verified.

    Raises:
        UnsupportedError: the backend cannot do the request (nothing has been traced).
        MismatchError: the lowered program does not compute what the model computes.
    """
    module = find_backend(backend)
    module.check(request)
    with new_folder(target, overwrite=overwrite) as folder:
        report("lower")
        lowered = module.lower(decoder, request, folder)
        report("hash")
        write_golden(folder, golden)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, folder / TOKENIZER)
        files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
        artifact = Artifact(
            backend=backend,
            name=name,
            entry=lowered.entry,
            model=request.model,
            cache=request.cache,
            cache_mode=lowered.cache_mode,
            formulation=lowered.formulation,
            weights=request.weights,
            quantisation=quantisation or Quantisation(request.recipe),
            capacities=lowered.capacities,
            prefill_chunk=lowered.prefill_chunk,
            files={p.relative_to(folder).as_posix(): file_entry(p) for p in files},
            tools={"edgeqkv": __version__, **lowered.tools},
            details=dict(lowered.details),
        )
        write_manifest(folder, artifact)
        if reference is not None:
            report("verify")
            result = verify_bundle(folder, reference=reference)
            if not result.passed:
                raise MismatchError(f"{target}: {result.failure}; no bundle was written")
    return artifact
