"""What a Q-K=V model costs without edgeqkv: the same weights as three projections, in other tools.

``write_baseline`` makes an ordinary bundle of a MODEL_DIR whose backend is the tool, so that bench,
verify and compare treat it as any other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from device_bench.jobs import JobFailed, run_job
from edgeqkv.artifact import MANIFEST, Artifact
from edgeqkv.config import CONFIG
from edgeqkv.console import note
from edgeqkv.errors import EdgeQKVError, MissingDependencyError, UsageError

TOOLS = (
    "optimum",
    "genai",
    "gguf",
    "gguf:q8_0",
    "gguf:q4_0",
)  # after the colon: how it stores weights
# The modules without which a tool cannot convert or run; an extra of the tool's name brings them.
NEEDS = {
    "optimum": ("optimum",),
    "genai": ("optimum", "onnxruntime_genai"),
    "gguf": ("gguf", "llama_cpp"),
}


class Baseline(Protocol):
    """A module ``device_bench.baselines.<tool>_``; its ``load`` is a runner entry point."""

    def write(self, model_dir: Path, target: Path, *stored: str) -> Artifact: ...


def write_baseline(tool: str, model_dir: Path, target: Path) -> Artifact:
    """Convert MODEL_DIR with ``tool`` and write the bundle ``target``, whole or not at all.

    Raises:
        UsageError: an unknown tool. CheckpointError: not a MODEL_DIR.
        UnsupportedError: a model that three projections cannot express.
        MissingDependencyError: the tool is not installed.
    """
    if tool not in TOOLS:
        raise UsageError(f"baseline tool is {tool!r}; allowed: {', '.join(TOOLS)}")
    name, *stored = tool.split(":")
    module = cast(Baseline, importlib.import_module(f"device_bench.baselines.{name}_"))
    return module.write(model_dir, target, *stored)


def resolve(paths: Sequence[Path], tools: str | None) -> list[tuple[Path, str | None]]:
    """(bundle, None) and, for each MODEL_DIR and tool of the comma list, (MODEL_DIR, tool).

    Raises:
        UsageError: an unknown tool, or one of MODEL_DIR and tool without the other.
        MissingDependencyError: a tool is not installed.
    """
    names = [] if tools is None else [t.strip() for t in tools.split(",")]
    if unknown := [t for t in names if t not in TOOLS]:
        raise UsageError(f"--baseline-tool is {unknown[0]!r}; allowed: {', '.join(TOOLS)}")
    models = [p for p in paths if (p / CONFIG).is_file() and not (p / MANIFEST).is_file()]
    if names and not models:
        raise UsageError("--baseline-tool needs a MODEL_DIR beside the bundles; none was given")
    if models and not names:
        raise UsageError(
            f"{models[0]} is a MODEL_DIR: export it first, or give --baseline-tool "
            f"{'|'.join(TOOLS)} to measure it there"
        )
    for name in dict.fromkeys(t.split(":")[0] for t in names):
        if missing := [m for m in NEEDS[name] if importlib.util.find_spec(m) is None]:
            raise MissingDependencyError(
                f"baseline {name} needs {missing[0]}; pip install 'edgeqkv[{name}]'"
            )
    found: list[tuple[Path, str | None]] = []
    for path in paths:
        found += [(path, tool) for tool in names] if path in models else [(path, None)]
    return found


def write_baselines(sources: Sequence[tuple[Path, str | None]], folder: Path) -> list[Path]:
    """The bundle of each of :func:`resolve`'s entries; a baseline's is made in ``folder``, by a process
    that ends: this one would hold the memory of the largest while it measures.

    Raises:
        EdgeQKVError: what :func:`write_baseline` raises.
    """
    paths = []
    for i, (path, tool) in enumerate(sources):
        if tool is not None:
            note(f"baseline {tool}: converting {path}")
            target = folder / str(i)
            try:
                run_job(
                    {"pass": "baseline", "tool": tool, "model": str(path), "bundle": str(target)}
                )
            except JobFailed as e:
                raise EdgeQKVError(str(e)) from None
            path = target
        paths.append(path)
    return paths
