"""The one command, ``edgeqkv``. Subcommands are entry points, imported only when called."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from edgeqkv import __version__
from edgeqkv.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, EdgeQKVError
from edgeqkv.interrupts import loads_library

# The order of `edgeqkv --help`: the order in which the main job uses them. Plug-ins follow.
ORDER = (
    "import",
    "train",
    "init",
    "inspect",
    "export",
    "verify",
    "audit",
    "eval",
    "generate",
    "bench",
    "devices",
    "device",
)

# What to do about an error of the operating system that nobody foresaw.
HINTS = {
    errno.ENOENT: "give a path that exists",
    errno.ENOTDIR: "a part of this path is a file; give another",
    errno.EEXIST: "there is a file or a link of this name; give another path",
    errno.EISDIR: "it is a folder; give a file",
    errno.EACCES: "change its permissions or give another path",
    errno.EROFS: "give a path that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "its links lead nowhere; give the real path",
    errno.ENOSPC: "free some space and run again",
}


class Command(TyperCommand):
    """One subcommand: an option of one value is given once, and usage names arguments as they are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        options = [p for p in order if p.param_type_name == "option"]
        for p, times in Counter(options).items():
            if times > 1 and not (getattr(p, "is_flag", False) or getattr(p, "multiple", False)):
                ctx.fail(f"{'/'.join(p.opts)} is given {times} times; give it once")
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        names = [(p.metavar or str(p.name).upper(), p.required) for p in arguments]
        return ["[OPTIONS]", *(name if needed else f"[{name}]" for name, needed in names)]


class Commands(TyperGroup):
    """Loads a subcommand's module when it is called, so ``inspect`` never imports torch."""

    def _found(self) -> dict[str, EntryPoint]:
        return {e.name: e for e in entry_points(group="edgeqkv.commands")}

    def list_commands(self, ctx: Any) -> list[str]:
        rank = {name: i for i, name in enumerate(ORDER)}
        return sorted(self._found(), key=lambda name: (rank.get(name, len(ORDER)), name))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self._found().get(cmd_name)
        if entry is None:
            return None
        single = typer.Typer(add_completion=False)
        single.command(name=cmd_name, cls=Command)(entry.load())
        command = typer.main.get_command(single)
        command.name = cmd_name
        # Paragraphs flow: their lines are as long as the code's, a terminal's may be shorter.
        paragraphs = (command.help or "").split("\n\n")
        command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
        return command


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgeqkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True),
) -> None:
    """Take a trained one-cache-tensor transformer to ONNX Runtime, ExecuTorch and Core ML.

    Example: edgeqkv export MODEL_DIR -b onnx,executorch,coreml -o OUT
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> None:
    """Entry point: every error a user can cause ends as one line on stderr and an exit status."""
    _make_streams()
    try:
        with _stopped_as_by_ctrl_c() as signals:
            status = app(prog_name="edgeqkv", standalone_mode=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except TyperException as e:
        _fail(_usage(e), EXIT_USAGE)
    except EdgeQKVError as e:
        _fail(str(e), e.exit_code)
    except OSError as e:
        _fail(_os_error(e))
    except MemoryError:
        _fail("out of memory; use a smaller model or --max-context")
    except Exception as e:  # a bug of ours or of an SDK: still one line, the rest on request
        first = (str(e).strip().splitlines() or ["no message"])[0][:300]
        _fail(f"unexpected {type(e).__name__}: {first} (EDGEQKV_TRACEBACK=1 shows where)")
    if signals:
        _say(f"stopped by {signals[0].name}")
        # All is put away; an SDK that was stopped halfway need not survive being torn down.
        os._exit(128 + signals[0])
    if status == EXIT_INTERRUPTED:
        _fail("interrupted", status)
    sys.exit(status)


def _make_streams() -> None:
    """Whatever the caller left open: three descriptors, and no name that cannot be printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        setattr(sys, name, stream)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _stopped_as_by_ctrl_c() -> Iterator[list[signal.Signals]]:
    """SIGTERM and a closed terminal unwind as Ctrl-C does: children end, nothing half-written stays.

    The yielded list holds what came, Ctrl-C aside. All three wait while a library sets itself up:
    onnx, for one, crashes the process when an exception comes in between.
    """
    seen: list[signal.Signals] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if loads_library(frame):
            again = threading.Timer(0.05, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        if number != signal.SIGINT:
            seen.append(signal.Signals(number))
        raise KeyboardInterrupt

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # the last is not on Windows
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    default = (signal.SIG_DFL, signal.default_int_handler)
    usual = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) in default}
    try:
        yield seen
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _usage(e: TyperException) -> str:
    """``edgeqkv export: missing argument MODEL_DIR; see edgeqkv export --help``."""
    ctx, param = getattr(e, "ctx", None), getattr(e, "param", None)
    word = next((a for a in sys.argv[1:] if not a.startswith("-")), "")
    command = ctx.command_path if ctx is not None else f"edgeqkv {word}".rstrip()
    what = e.format_message()
    if param is not None:
        is_option = param.param_type_name == "option"
        name = "/".join(param.opts) if is_option else param.metavar or param.name.upper()
        what = f"missing {param.param_type_name} {name}"
        if e.message:
            found = [error["input"] for error in getattr(e.__cause__, "errors", list)()]
            what = name + (f" is {found[0]!r}" if found else "") + f": {e.message}"
            what = what.replace("Input should be", "it should be")
            what = re.sub(", unable to parse.*", "", what)
    what = " ".join(what.split()).rstrip(".")
    return f"{command}: {what[:1].lower()}{what[1:]}; see {command} --help"


def _os_error(e: OSError) -> str:
    where = f"{e.filename}: " if e.filename else ""
    hint = HINTS.get(e.errno or 0)
    return f"{where}{e.strerror or e}" + (f"; {hint}" if hint else "")


def _fail(message: str, status: int = EXIT_ERROR) -> None:
    _say(message)
    sys.exit(status)


def _say(message: str) -> None:
    if os.environ.get("EDGEQKV_TRACEBACK"):
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.splitlines()))
    print(f"error: {line}", file=sys.stderr, flush=True)
