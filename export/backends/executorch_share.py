"""Store a tensor once that a .pte holds twice: as a constant and as a delegate's named data.

A tied embedding is read by ``aten::embedding`` (a constant) and by XNNPACK's output projection
(named data); the SDK writes both. A segment is an offset and a size, so the named data's segment
can point into the constants.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from export.backends.executorch_pte import Pte, constants, load_pte

_ALIGNMENT = 128  # of a segment, as the SDK writes them
_BLOCK = 1 << 22


def share(path: Path) -> int:
    """Rewrite a .pte in place; returns the bytes it became shorter by."""
    pte = load_pte(path)
    aliases = _aliases(pte)
    if not aliases:
        return 0
    segments = pte.program.segments
    source = [segment.offset for segment in segments]
    end = 0
    for i, segment in enumerate(segments):
        if i not in aliases:
            segment.offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = segment.offset + segment.size
    start = segments[pte.program.constant_segment.segment_index].offset
    for i, inner in aliases.items():
        segments[i].offset = start + inner
    before = path.stat().st_size
    temporary = path.with_suffix(".shared")
    with temporary.open("wb") as out, path.open("rb") as old:
        head = _program_bytes(pte.program, end)
        out.write(head)
        for i, segment in enumerate(segments):
            if i not in aliases:
                out.seek(len(head) + segment.offset)
                old.seek(pte.base + source[i])
                _copy(old, out, segment.size)
    temporary.replace(path)
    return before - path.stat().st_size


def _aliases(pte: Pte) -> dict[int, int]:
    """Segment index of named data -> offset in the constant segment that holds the same bytes."""
    program = pte.program
    named = {n.segment_index: program.segments[n.segment_index] for n in program.named_data or []}
    inner = constants(pte)
    if not inner:
        return {}
    start = program.segments[program.constant_segment.segment_index].offset
    sizes = {segment.size for segment in named.values()}
    held = {
        hashlib.sha256(pte.read(start + offset, size)).digest(): offset
        for offset, size in inner.items()
        if size in sizes
    }
    digests = {i: hashlib.sha256(pte.segment(i)).digest() for i in named}
    return {i: held[digest] for i, digest in digests.items() if digest in held}


def _program_bytes(program: Any, segment_bytes: int) -> bytes:
    """The flatbuffer with its extended header, padded to where segments start."""
    from executorch.exir._serialize._flatbuffer_program import _program_to_flatbuffer
    from executorch.exir._serialize._program import _ExtendedHeader, _insert_flatbuffer_header
    from executorch.exir.tensor import ALIGNMENT

    flat = _program_to_flatbuffer(program, constant_tensor_alignment=ALIGNMENT)
    aligned = -(-_ExtendedHeader.EXPECTED_LENGTH // flat.max_alignment) * flat.max_alignment
    size = aligned + len(flat.data)
    base = -(-size // _ALIGNMENT) * _ALIGNMENT
    header = _ExtendedHeader(
        program_size=size, segment_base_offset=base, segment_data_size=segment_bytes
    ).to_bytes()
    data: bytes = _insert_flatbuffer_header(
        flat.data, r"ET[0-9a-zA-Z]{2}", header.ljust(aligned, b"\0")
    )
    return data.ljust(base, b"\0")


def _copy(source: Any, target: Any, nbytes: int) -> None:
    while nbytes:
        block = source.read(min(nbytes, _BLOCK))
        target.write(block)
        nbytes -= len(block)
