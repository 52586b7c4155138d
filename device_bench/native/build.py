"""Compile the native runner for this machine. ``cross.py`` makes the folder that a phone gets."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from edgeqkv.errors import EdgeQKVError, MissingDependencyError
from edgeqkv.files import new_folder

HERE = Path(__file__).parent
PROGRAM = "edgeqkv-bench"
SHARED = ("bench.c", "job.c", "memory.c")
HEADERS = ("runner.h", "job.h", "memory.h", "third_party/onnxruntime_c_api.h")
PACKAGE = {"onnx": "onnxruntime", "executorch": "executorch"}
RUNTIME_SOURCE = {"onnx": "onnxruntime.c", "executorch": "executorch.cpp"}
CFLAGS = ("-O2", "-Wall", "-Wextra", "-Wno-sign-compare", "-std=c11")
CXXFLAGS = ("-O2", "-Wall", "-std=c++17", "-DC10_USING_CUSTOM_GENERATED_MACROS")
PORTABLE_C10 = "executorch/runtime/core/portable_type/c10"
EXECUTORCH_LIBRARIES = (
    "executorch",
    "executorch_threadpool",
    "executorch_kernels_optimized",
    "executorch_kernels_quantized",
    "executorch_backend_xnnpack",
)


@dataclasses.dataclass(frozen=True)
class Compilers:
    """Programs to look for, in order, and what to say where there is none."""

    c: tuple[str, ...]
    cxx: tuple[str, ...]
    advice: str


HOST = Compilers(
    ("cc", "gcc", "clang"), ("c++", "g++", "clang++"), "a C compiler: apt-get install gcc g++"
)


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
    package = PACKAGE[backend]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            f"the native runner needs {package}'s libraries; pip install 'edgeqkv[{backend}]'"
        )
    return Path(next(iter(found.submodule_search_locations)))


def installed_runtime(backend: str) -> str:
    """Names the installed runtime: a program built for it does not fit another version or place."""
    return f"{version(PACKAGE[backend])} {runtime_folder(backend)}"


def onnx_library(runtime: Path) -> Path:
    """libonnxruntime.so.VERSION of a wheel's package folder."""
    libraries = sorted((runtime / "capi").glob("libonnxruntime.so.*"))
    if not libraries:
        raise EdgeQKVError(
            f"{runtime} has no libonnxruntime.so; the native runner needs Linux wheels"
        )
    return libraries[-1]


def build_here(backend: str) -> Runner:
    """Compile for this machine against the installed runtime, once per version of the sources.

    Raises:
        MissingDependencyError: no C or C++ compiler, or no runtime.
    """
    runtime = runtime_folder(backend)
    library = str(onnx_library(runtime)) if backend == "onnx" else ""
    target = cache_folder() / "native" / fingerprint(backend, installed_runtime(backend))
    if not (target / PROGRAM).exists():
        with new_folder(target, overwrite=True) as folder:
            compile_program(backend, HOST, folder / PROGRAM, runtime, rpath=True)
    return Runner(target / PROGRAM, library)


def compile_program(
    backend: str, compilers: Compilers, program: Path, runtime: Path, *, rpath: bool
) -> None:
    """Compile and link. ONNX Runtime is loaded by name when a job runs: nothing of it is needed.

    runtime: the package folder of ExecuTorch's wheel, with its headers and libraries. rpath: the
    program finds them there; otherwise beside itself, by its loader's --library-path.
    """
    cc = find_compiler(compilers.c, compilers.advice)
    if backend == "onnx":
        sources = [str(HERE / name) for name in (*SHARED, RUNTIME_SOURCE[backend])]
        run_compiler([cc, *CFLAGS, "-o", str(program), *sources, "-lm", "-ldl"])
        return
    cxx = find_compiler(compilers.cxx, compilers.advice)
    include, library = runtime / "include", runtime / "lib"
    where = ["-I", str(include), "-I", str(include / PORTABLE_C10)]
    with tempfile.TemporaryDirectory(prefix="edgeqkv-native-") as folder:
        objects = [str(Path(folder, f"{name}.o")) for name in (*SHARED, RUNTIME_SOURCE[backend])]
        for name, made in zip(SHARED, objects, strict=False):
            run_compiler([cc, *CFLAGS, "-c", "-o", made, str(HERE / name)])
        source = str(HERE / RUNTIME_SOURCE[backend])
        run_compiler([cxx, *CXXFLAGS, *where, "-c", "-o", objects[-1], source])
        # Kernels and backends register themselves as their libraries load; no symbol names them.
        named = [f"-l{name}" for name in EXECUTORCH_LIBRARIES]
        link = ["-L", str(library), "-Wl,--no-as-needed", *named, "-Wl,--as-needed", "-lm", "-ldl"]
        found = [f"-Wl,-rpath,{library}"] if rpath else ["-Wl,--allow-shlib-undefined"]
        run_compiler([cxx, "-o", str(program), *objects, *link, *found])


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
    digest = hashlib.sha256(repr((CFLAGS, CXXFLAGS, EXECUTORCH_LIBRARIES, more)).encode())
    for name in (*SHARED, *HEADERS, RUNTIME_SOURCE[backend]):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]
