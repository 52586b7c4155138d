"""Compile the native runner for this machine. ``cross.py`` makes the folder that a phone gets."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from edgeqkv.errors import EdgeQKVError, MissingDependencyError
from edgeqkv.files import new_folder

HERE = Path(__file__).parent
PROGRAM = "edgeqkv-bench"
SHARED = ("bench.c", "job.c", "memory.c")
HEADERS = ("runner.h", "job.h", "memory.h", "third_party/onnxruntime_c_api.h")
RUNTIME_SOURCE = {"onnx": "onnxruntime.c", "executorch": "executorch.cpp"}
CFLAGS = ("-O2", "-Wall", "-Wextra", "-Wno-sign-compare", "-std=c11")


@dataclasses.dataclass(frozen=True)
class Runner:
    """A program for this machine. library: the runtime that a job names, "" where it is linked."""

    program: Path
    library: str


def cache_folder() -> Path:
    """Where programs and downloads are kept: $XDG_CACHE_HOME/edgeqkv, or ~/.cache/edgeqkv."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeqkv"


def runtime_folder(backend: str) -> Path:
    """The installed runtime's package folder, found without importing it.

    Raises:
        MissingDependencyError: it is not installed.
    """
    package = {"onnx": "onnxruntime", "executorch": "executorch"}[backend]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            f"the native runner needs {package}'s libraries; pip install 'edgeqkv[{backend}]'"
        )
    return Path(next(iter(found.submodule_search_locations)))


def onnx_library() -> Path:
    """libonnxruntime.so.VERSION of the installed wheel."""
    libraries = sorted((runtime_folder("onnx") / "capi").glob("libonnxruntime.so.*"))
    if not libraries:
        raise EdgeQKVError(
            f"{runtime_folder('onnx')} has no libonnxruntime.so; the native runner needs Linux wheels"
        )
    return libraries[-1]


def build_here(backend: str) -> Runner:
    """Compile for this machine against the installed runtime, once per version of the sources.

    Raises:
        MissingDependencyError: no C compiler, or no runtime.
    """
    library = onnx_library()
    key = fingerprint(backend, "here")
    target = cache_folder() / "native" / key
    if not (target / PROGRAM).exists():
        compiler = find_compiler(("cc", "gcc", "clang"), "a C compiler: apt-get install gcc")
        with new_folder(target, overwrite=True) as folder:
            compile_onnx(compiler, folder / PROGRAM)
    return Runner(target / PROGRAM, str(library))


def compile_onnx(compiler: str, program: Path) -> None:
    """The runtime is loaded by name when the job runs: nothing of it is needed here."""
    sources = [str(HERE / name) for name in (*SHARED, RUNTIME_SOURCE["onnx"])]
    run_compiler([compiler, *CFLAGS, "-o", str(program), *sources, "-lm", "-ldl"])


def run_compiler(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise EdgeQKVError(f"{command[0]} failed on the native runner: {lines[0][:300]}")


def find_compiler(names: Sequence[str], advice: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise MissingDependencyError(f"the native runner needs {advice}")
    return found


def fingerprint(backend: str, *more: str) -> str:
    """Names what would be compiled: a change of any source makes another."""
    digest = hashlib.sha256(repr((CFLAGS, more)).encode())
    for name in (*SHARED, *HEADERS, RUNTIME_SOURCE[backend]):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]
