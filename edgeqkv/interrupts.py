"""Ctrl-C and SIGTERM: something to do between the signal and the exception that it becomes. No torch."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any


def loads_library(frame: FrameType | None) -> bool:
    """Whether the frame, or one that called it, is the import of a module that is not Python."""
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def heard(hear: Callable[[int, Callable[[], Any]], None]) -> Iterator[None]:
    """In the block a signal calls ``hear(number, usual)``; ``usual()`` does what is done without.

    A signal that Python does not handle, SIGTERM outside of the command line, stays as it is.
    """
    usual: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def handler(number: int, frame: FrameType | None) -> None:
        hear(number, lambda: usual[number](number, frame))

    if threading.current_thread() is threading.main_thread():  # no other may change a handler
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if callable(before):
                usual[number] = before
                signal.signal(number, handler)
    try:
        yield
    finally:
        for each, before in usual.items():
            signal.signal(each, before)
