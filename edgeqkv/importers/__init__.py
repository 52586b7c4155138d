"""Read other people's checkpoints. One module per source format, tried in order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from edgeqkv.errors import CheckpointError
from edgeqkv.importers import hf_gpt2, hub, nanogpt, three_projections, wqkv
from edgeqkv.importers.convert import Imported, Source
from edgeqkv.importers.read import open_checkpoint, weights

__all__ = ["Imported", "read_checkpoint"]


class Format(Protocol):
    """What a module of one format has. STATE and CONFIG are keys of the checkpoint dict."""

    NAME: str
    STATE: str
    CONFIG: str

    def detect(self, checkpoint: Mapping[str, Any]) -> bool: ...

    def convert(self, source: Source) -> Imported: ...


_FORMATS: tuple[Format, ...] = (three_projections, wqkv, nanogpt)


def read_checkpoint(source: str) -> Imported:
    """Detect the format of ``source`` (a path or ``hf:OWNER/NAME[/FILE]``) and read it.

    A folder is a Hugging Face GPT-2's.

    The weights stay memory-mapped where the file allows it.

    Raises:
        CheckpointError: the file is damaged, hostile, of no known format, fits two variants, or has
            a tensor missing, too many, misshapen or not finite.
        MissingDependencyError: ``hf:`` without huggingface_hub.
    """
    path = hub.fetch(source) if source.startswith(hub.PREFIX) else Path(source)
    if path.is_dir():
        return hf_gpt2.read(path)
    checkpoint = open_checkpoint(path)
    for format_ in _FORMATS:
        if format_.detect(checkpoint):
            config = checkpoint.get(format_.CONFIG)
            if not isinstance(config, Mapping):
                raise CheckpointError(
                    f"{source} looks like {format_.NAME} but has no {format_.CONFIG} dict; "
                    f"found: {_keys(checkpoint)}; save the config beside the weights"
                )
            state = weights(checkpoint[format_.STATE], source)
            return format_.convert(Source(source, format_.CONFIG, config, state))
    known = "; ".join(f"{f.NAME}: {f.STATE} + {f.CONFIG}" for f in _FORMATS)
    raise CheckpointError(
        f"{source} is of no known format; found keys: {_keys(checkpoint)}; allowed: {known}; "
        f"{hf_gpt2.NAME}: the folder; save weights and config under such keys"
    )


def _keys(checkpoint: Mapping[str, object]) -> str:
    names = [str(k)[:40] for k in checkpoint]
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "none"
