"""A bundle opened for a sweep, and the jobs that its processes run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from device_bench.workload import Workload
from edgeqkv.artifact import MANIFEST, Artifact, file_entry, read_artifact


@dataclasses.dataclass(frozen=True)
class Bundle:
    path: Path
    artifact: Artifact
    sha256: str


def open_bundle(path: Path) -> Bundle:
    """Read and hash a bundle once for the whole sweep; raises BundleError."""
    return Bundle(path, read_artifact(path), file_entry(path / MANIFEST).sha256)


def job(name: str, bundle: Bundle, workload: Workload) -> dict[str, Any]:
    """A job as ``device_bench.worker`` reads it."""
    path = str(bundle.path.resolve())
    return {"pass": name, "bundle": path, "workload": dataclasses.asdict(workload)}


def step_weight_bytes(artifact: Artifact) -> int:
    """Bytes of weights that one decode step reads at least, as the bundle's recipe stores them.

    Every matrix that is multiplied and every vector; of the two tables that a token is looked up in
    one row each, which rounds to nothing, unless the output layer is tied to the first.
    """
    spec, recipe = artifact.model, artifact.quantisation.recipe
    looked_up = ["wpe"] if spec.tie_word_embeddings else ["wpe", "wte"]
    shapes = spec.parameter_shapes()
    tables = [recipe.rule_for(t).nbytes(shapes[f"{t}.weight"]) for t in looked_up]
    return recipe.weight_bytes(spec) - sum(tables)
