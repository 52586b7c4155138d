"""What a Q-K=V model costs without edgeqkv: the same weights as three projections, in other tools.

``write_baseline`` makes an ordinary bundle of a MODEL_DIR whose backend is the tool, so that bench,
verify and compare treat it as any other.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

from edgeqkv.artifact import Artifact
from edgeqkv.errors import UsageError

TOOLS = ("optimum", "gguf")


class Baseline(Protocol):
    """A module ``device_bench.baselines.<tool>_``; its ``load`` is a runner entry point."""

    def write(self, model_dir: Path, target: Path) -> Artifact: ...


def write_baseline(tool: str, model_dir: Path, target: Path) -> Artifact:
    """Convert MODEL_DIR with ``tool`` and write the bundle ``target``, whole or not at all.

    Raises:
        UsageError: an unknown tool. CheckpointError: not a MODEL_DIR.
        UnsupportedError: a model that three projections cannot express.
        MissingDependencyError: the tool is not installed.
    """
    if tool not in TOOLS:
        raise UsageError(f"baseline tool is {tool!r}; allowed: {', '.join(TOOLS)}")
    module = cast(Baseline, importlib.import_module(f"device_bench.baselines.{tool}_"))
    return module.write(model_dir, target)
