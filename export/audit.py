"""Is a bundle what its manifest claims? Read the artifact itself, then compare."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from edgeqkv.artifact import Artifact, read_artifact
from edgeqkv.cache import DTYPE_BYTES, cache_spec
from edgeqkv.errors import BundleError, UnsupportedError
from export.facts import ArtifactFacts


@dataclasses.dataclass(frozen=True)
class Audit:
    """``problems``: contradictions between manifest and artifact, each one line."""

    bundle: str
    artifact: Artifact
    facts: ArtifactFacts
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        cache = self.artifact.cache
        return {
            "bundle": self.bundle,
            "backend": self.artifact.backend,
            "formulation": self.artifact.formulation,
            "layout": cache.layout,
            "bytes_per_token": {
                "formula": cache.bytes_per_token,
                "declared": self.facts.bytes_per_token,
            },
            **dataclasses.asdict(self.facts),
            "problems": list(self.problems),
            "passed": not self.problems,
        }


def read_facts(bundle: Path, artifact: Artifact) -> ArtifactFacts:
    """What ``export.backends.read_<backend>`` finds in the artifact's own file."""
    module = f"export.backends.read_{artifact.backend}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if not module.startswith(str(e.name)):
            raise
        raise UnsupportedError(
            f"{bundle}: no audit for backend {artifact.backend!r}; allowed: onnx, executorch, coreml"
        ) from None
    try:
        facts: ArtifactFacts = found.read(artifact, bundle)
    except (
        BundleError
    ) as e:  # which says what is wrong with the file; what to do is the same for all
        raise BundleError(f"{e}; export the bundle again") from None
    return facts


def audit_bundle(bundle: Path) -> Audit:
    """Raises BundleError when the bundle cannot be read; a contradiction is a result."""
    artifact = read_artifact(bundle)
    facts = read_facts(bundle, artifact)
    return Audit(str(bundle), artifact, facts, tuple(find_problems(artifact, facts)))


def find_problems(artifact: Artifact, facts: ArtifactFacts) -> list[str]:
    """Every contradiction between what the manifest says and what the artifact is."""
    cache, problems = artifact.cache, []
    layers: dict[int | None, list[str]] = {i: [] for i in range(cache.num_layers)}
    expected = cache.tensors_per_layer * (2 if cache.scale_itemsize else 1)  # and their scales
    for tensor in facts.cache_tensors:
        layers.setdefault(tensor.layer, []).append(tensor.name)
    for layer, names in layers.items():
        if layer is None:
            problems.append(f"cache tensor {names[0]} belongs to no layer of the model")
        elif layer >= cache.num_layers:
            problems.append(f"cache tensor {names[0]} is of layer {layer}, which the model lacks")
        elif len(names) != expected:
            problems.append(
                f"layer {layer} holds {len(names)} cache tensors ({', '.join(names) or 'none'}); "
                f"layout {cache.layout}, {cache.dtype} means {expected}"
            )
    itemsizes = {True: cache.scale_itemsize, False: DTYPE_BYTES[cache.dtype]}
    wrong = [t for t in facts.cache_tensors if t.itemsize != itemsizes[t.role == "scale"]]
    problems += [f"cache tensor {t.name} is {t.dtype}; manifest says {cache.dtype}" for t in wrong]
    if facts.bytes_per_token != cache.bytes_per_token:
        problems.append(
            f"the artifact declares {facts.bytes_per_token} bytes per token; "
            f"the formula gives {cache.bytes_per_token}"
        )
    problems += [f"copies the cache: {copy}" for copy in facts.cache_copies]
    problems += _manifest_problems(artifact)
    return problems


def _manifest_problems(artifact: Artifact) -> list[str]:
    """The manifest against itself: its cache must follow from its model."""
    cache = artifact.cache
    if cache.layout == "shared" and not artifact.model.key_is_value:
        return [f"layout shared contradicts the model {artifact.model.label}"]
    layout = "auto" if cache.layout == "none" else cache.layout
    expected = cache_spec(artifact.model, layout=layout, dtype=cache.dtype, capacity=cache.capacity)
    return [] if expected == cache else ["the manifest's cache does not follow from its model"]
