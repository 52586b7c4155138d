"""The one command, ``edgeqkv``. Subcommands are entry points, imported only when called."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from edgeqkv import __version__
from edgeqkv.errors import EXIT_ERROR, EXIT_INTERRUPTED, EdgeQKVError

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


ALONE = ("devices",)  # run without arguments, where the others then show their help


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
        single.command(name=cmd_name, no_args_is_help=cmd_name not in ALONE)(entry.load())
        command = typer.main.get_command(single)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgeqkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True),
) -> None:
    """Take a trained one-cache-tensor transformer to ONNX Runtime, ExecuTorch and Core ML.

    Example: edgeqkv export MODEL_DIR -b onnx,executorch,coreml -o OUT
    """


def main() -> None:
    """Entry point: every error a user can cause ends as one line on stderr and an exit status."""
    try:
        app()
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except EdgeQKVError as e:
        _fail(str(e), e.exit_code)
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        hint = "; free some space and run again" if e.errno == errno.ENOSPC else ""
        _fail(f"{where}{e.strerror or e}{hint}")
    except MemoryError:
        _fail("out of memory; use a smaller model or --max-context")
    except Exception as e:  # a bug of ours or of an SDK: still one line, the rest on request
        first = (str(e).strip().splitlines() or ["no message"])[0][:300]
        _fail(f"unexpected {type(e).__name__}: {first} (EDGEQKV_TRACEBACK=1 shows where)")


def _fail(message: str, status: int = EXIT_ERROR) -> None:
    if os.environ.get("EDGEQKV_TRACEBACK"):
        traceback.print_exc()
    print("error: " + " ".join(message.split("\n")), file=sys.stderr)
    sys.exit(status)
