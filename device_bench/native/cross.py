"""Compile the native runner for a phone, into a folder that carries its own loader and C library.

Android has another C library than the runtimes' wheels were built for. The folder holds Debian's:
``lib/ld-linux-aarch64.so.1 --library-path lib bin/edgeqkv-bench`` needs nothing of the phone but its
kernel, so neither an app nor the NDK nor root.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from device_bench.native.build import (
    EXECUTORCH_LIBRARIES,
    PROGRAM,
    Compilers,
    cache_folder,
    compile_program,
    find_compiler,
    fingerprint,
    installed_runtime,
    onnx_library,
    runtime_folder,
)
from edgeqkv.artifact import FileEntry, file_entry
from edgeqkv.errors import EdgeQKVError, MissingDependencyError, UnsupportedError
from edgeqkv.files import new_folder

MANIFEST = "runner.json"


@dataclasses.dataclass(frozen=True)
class Target:
    """android: the phone's name of the ABI."""

    android: str
    compilers: Compilers
    loader: str


@dataclasses.dataclass(frozen=True)
class Wheel:
    """requirement and sha256: what pip downloads. package: the folder inside that is kept."""

    requirement: str
    sha256: str
    platforms: tuple[str, ...]
    package: str


TARGETS = {
    "arm64": Target(
        "arm64-v8a",
        Compilers(
            ("aarch64-linux-gnu-gcc",),
            ("aarch64-linux-gnu-g++",),
            "a compiler for arm64: apt-get install gcc-aarch64-linux-gnu g++-aarch64-linux-gnu",
        ),
        "ld-linux-aarch64.so.1",
    ),
    "x86_64": Target(
        "x86_64",
        Compilers(
            ("x86_64-linux-gnu-gcc",),
            ("x86_64-linux-gnu-g++",),
            "a compiler for x86_64: apt-get install gcc g++",
        ),
        "ld-linux-x86-64.so.2",
    ),
}
WHEELS = {
    ("onnx", "arm64"): Wheel(
        "onnxruntime==1.32.0",
        "2303372a85299b6757b0e11e1cbf13e410ddf7e10c37f4b37e99d1c90e7daf7c",
        ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64"),
        "onnxruntime",
    ),
    ("executorch", "arm64"): Wheel(
        "executorch==1.5.1",
        "8ee02348a3ea80ddf770822911ebf78da616b73afce0fbaaa79f23311c88c66a",
        ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64"),
        "executorch",
    ),
}
# What of a wheel is unpacked: libraries of C, and headers.
_KEPT = re.compile(r"(capi/libonnxruntime\.so\..*|lib/lib[a-z_]*\.so|include/.*\.h)")
LIBRARY = {"onnx": "libonnxruntime.so.1", "executorch": ""}  # as a job names it


@dataclasses.dataclass(frozen=True)
class RunnerFolder:
    """A built folder. files: every file in it, by its path inside. library: as a job names it."""

    path: Path
    abi: str
    backend: str
    loader: str
    library: str
    files: dict[str, FileEntry]

    @property
    def sha256(self) -> str:
        return file_entry(self.path / MANIFEST).sha256


def abi_of(android_abi: str | None) -> str:
    """``arm64`` or ``x86_64`` for what a phone calls its ABI; UnsupportedError for others."""
    for abi, target in TARGETS.items():
        if target.android == android_abi:
            return abi
    allowed = ", ".join(t.android for t in TARGETS.values())
    raise UnsupportedError(f"no runner for ABI {android_abi!r}; allowed: {allowed}")


def build_folder(abi: str, backend: str) -> RunnerFolder:
    """Build the folder, or find it built: it is kept in the cache, one per version of the sources.

    Raises:
        UnsupportedError: an unknown ABI, or a backend that has no runner there.
        MissingDependencyError: no cross compiler. EdgeQKVError: the download or compiler failed.
    """
    if abi not in TARGETS:
        raise UnsupportedError(f"--abi is {abi!r}; allowed: {', '.join(TARGETS)}")
    if backend not in LIBRARY:
        allowed = ", ".join(LIBRARY)
        raise UnsupportedError(f"--backend is {backend!r}; allowed for phones: {allowed}")
    target, wheel = TARGETS[abi], WHEELS.get((backend, abi))
    key = fingerprint(backend, abi, wheel.sha256 if wheel else installed_runtime(backend))
    folder = cache_folder() / "native" / f"{backend}-{abi}-{key}"
    if not (folder / MANIFEST).exists():
        find_compiler(target.compilers.c, target.compilers.advice)  # before anything is downloaded
        runtime = _from_wheel(wheel) if wheel else runtime_folder(backend)
        with new_folder(folder, overwrite=True) as new:
            _fill(new, abi, backend, runtime)
    return read_folder(folder)


def _fill(new: Path, abi: str, backend: str, runtime: Path) -> None:
    (new / "bin").mkdir()
    (new / "lib").mkdir()
    target, program = TARGETS[abi], new / "bin" / PROGRAM
    compile_program(backend, target.compilers, program, runtime, rpath=False)
    own = _runtime_libraries(backend, runtime)
    for name, source in own.items():
        shutil.copyfile(source, new / "lib" / name)
    compiler = find_compiler(target.compilers.c, target.compilers.advice)
    roots: list[Path | str] = [program, *own.values(), target.loader]
    for name, source in _system_libraries(compiler, roots, own):
        shutil.copyfile(source, new / "lib" / name)
    for started in (program, new / "lib" / target.loader):
        started.chmod(0o755)
    files = {
        p.relative_to(new).as_posix(): dataclasses.asdict(file_entry(p))
        for p in sorted(new.rglob("*"))
        if p.is_file()
    }
    about = {"abi": abi, "backend": backend, "loader": target.loader}
    about["library"] = LIBRARY[backend]
    (new / MANIFEST).write_text(json.dumps({**about, "files": files}, indent=2) + "\n", "utf-8")


def _runtime_libraries(backend: str, runtime: Path) -> dict[str, Path]:
    """The runtime's own libraries, by the name under which they are looked for."""
    if backend == "onnx":
        return {LIBRARY[backend]: onnx_library(runtime)}
    return {f"lib{n}.so": runtime / "lib" / f"lib{n}.so" for n in EXECUTORCH_LIBRARIES}


def _system_libraries(
    compiler: str, roots: Iterable[Path | str], own: Iterable[str]
) -> Iterator[tuple[str, Path]]:
    """(name, file) of what ``roots`` need beside ``own``, from the compiler's own folders."""
    todo, seen = list(roots), set(own)
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            if item in seen:
                continue
            seen.add(item)
            found = _output([compiler, f"-print-file-name={item}"]).strip()
            if not Path(found).is_absolute():
                raise MissingDependencyError(
                    f"the compiler {compiler} has no {item}; install its C++ library too (g++)"
                )
            yield item, Path(found)
            item = Path(found)
        lines = _output(["readelf", "-d", str(item)]).splitlines()
        todo += [line.split("[")[1].split("]")[0] for line in lines if "(NEEDED)" in line]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise MissingDependencyError(f"{command[0]} is missing; apt-get install binutils") from None
    except subprocess.CalledProcessError as e:
        raise EdgeQKVError(f"{command[0]} failed: {e.stderr.strip()[:200]}") from None
    return done.stdout


def _from_wheel(wheel: Wheel) -> Path:
    """The wheel's package folder, libraries and headers; pip downloads it once and checks the hash."""
    kept = cache_folder() / "downloads" / f"{wheel.package}-{wheel.sha256[:16]}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="edgeqkv-wheel-") as folder:
            _download(wheel, Path(folder))
            (path,) = Path(folder).glob("*.whl")
            with new_folder(kept, overwrite=True) as new, zipfile.ZipFile(path) as archive:
                start = f"{wheel.package}/"
                for name in archive.namelist():
                    if name.startswith(start) and _KEPT.fullmatch(name[len(start) :]):
                        archive.extract(name, new)  # never outside ``new``
    return kept / wheel.package


def _download(wheel: Wheel, folder: Path) -> None:
    pins = folder / "pins.txt"
    pins.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", "utf-8")
    where = [word for p in wheel.platforms for word in ("--platform", p)]
    only = [
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.11",
        "--implementation",
        "cp",
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes"]
    done = subprocess.run(
        [*command, *only, *where, "-d", str(folder), "-r", str(pins)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
        raise EdgeQKVError(f"{wheel.requirement} could not be downloaded: {said}")


def read_folder(folder: Path) -> RunnerFolder:
    data = json.loads((folder / MANIFEST).read_text("utf-8"))
    files = {name: FileEntry(**entry) for name, entry in data.pop("files").items()}
    return RunnerFolder(path=folder, files=files, **data)
