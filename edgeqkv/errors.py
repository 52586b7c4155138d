"""One exception family: every error a user can cause is one clear line and a fixed exit status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# A file, folder or text that is missing or malformed, a missing SDK, a full disk: all without a
# status of its own.
EXIT_ERROR = 1
# The command line: a flag that is missing, unknown or contradicts another, or whose value is not
# allowed, be it for this model.
EXIT_USAGE = 2
EXIT_MISMATCH = 4  # an artifact does not compute, or is not, what it claims
EXIT_INVALID = 5  # a measurement contradicts formula or declaration
EXIT_REGRESSION = 6  # compare found a regression
EXIT_INTERRUPTED = 130  # by Ctrl-C; 128 + its number by another signal (143: SIGTERM)


class EdgeQKVError(Exception):
    """A one-line message that names the thing, what was found, what is allowed and how to fix it."""

    exit_code = EXIT_ERROR


class SpecError(EdgeQKVError):
    """A model, cache or manifest description that contradicts itself or the papers' variants."""


class CheckpointError(EdgeQKVError):
    """A checkpoint that is damaged, hostile, ambiguous or of the wrong shape."""


class TextError(EdgeQKVError):
    """A text file that is missing, no UTF-8 or too short."""


class BundleError(EdgeQKVError):
    """A bundle folder that is incomplete, altered or unsafe to read."""


class UnsupportedError(EdgeQKVError):
    """Something asked of a backend or runner that it cannot do; says what it can."""


class MissingDependencyError(EdgeQKVError):
    """An optional SDK is not installed; the message carries the pip command."""


class RunError(EdgeQKVError):
    """A runner was fed what it must refuse: empty prompt, foreign token id, context overflow."""


class MismatchError(EdgeQKVError):
    """verify or audit found that an artifact is not what it claims."""

    exit_code = EXIT_MISMATCH


class UsageError(EdgeQKVError):
    """A flag value that makes no sense."""

    exit_code = EXIT_USAGE


def first_line(e: BaseException) -> str:
    """What an exception of somebody else's says, for one line; its type where it says nothing."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


@contextlib.contextmanager
def of_flag(flag: str) -> Iterator[None]:
    """What the block refuses was given by a flag: the message names it, the status is EXIT_USAGE."""
    try:
        yield
    except (SpecError, UnsupportedError, UsageError) as e:
        named = str(e).startswith("--")
        raise UsageError(str(e) if named else f"{flag}: {e}") from None
