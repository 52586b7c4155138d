"""Keep what vendor SDKs print out of users' sight, and show it when something fails."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow warnings, logging and what native code writes to file descriptors 1 and 2.

    When the block raises, the last lines swallowed become a note of the exception.
    ``EDGEQKV_VERBOSE=1`` turns it off. Not for use around our own output.
    """
    if os.environ.get("EDGEQKV_VERBOSE"):
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    before = logging.root.manager.disable
    with tempfile.TemporaryFile() as sink, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield
        except Exception as e:
            sink.seek(0)
            if tail := sink.read()[-2000:].decode("utf-8", "replace").strip():
                e.add_note(tail)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            logging.disable(before)
            for fd, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, fd)
                os.close(copy)
