"""onnxruntime-web, from npm: downloaded once, checked by hash, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from edgeqkv.console import note
from edgeqkv.errors import MissingDependencyError

VERSION = "1.30.0"
TIMEOUT_S = 600
# sha256 of what the page loads, and of nothing else in the package: the CPU build (wasm), and the
# WebGPU provider with the build that it needs. Their C functions are called directly (page/wasm.js),
# which is one more reason for a version to be exactly this one.
SHA256 = {
    "ort-wasm-simd-threaded.mjs": "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    "ort.webgpu.min.mjs": "3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0",
    "ort-wasm-simd-threaded.asyncify.mjs": "3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28",
    "ort-wasm-simd-threaded.asyncify.wasm": "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",
}


def cache_folder() -> Path:
    """Where downloads are kept: EDGEQKV_CACHE, else XDG_CACHE_HOME/edgeqkv, else ~/.cache/edgeqkv."""
    if named := os.environ.get("EDGEQKV_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeqkv"


def runtime_files() -> dict[str, Path]:
    """The files of onnxruntime-web by name, downloaded where they are not there yet.

    Raises:
        MissingDependencyError: no network, or the download is not what was pinned.
    """
    folder = cache_folder() / f"onnxruntime-web-{VERSION}"
    if bad := _differing(folder):
        note(f"fetching onnxruntime-web {VERSION} (33 MB, once)")
        _download(folder)
        if bad := _differing(folder):
            raise MissingDependencyError(
                f"{folder / bad[0]} is not the {bad[0]} of onnxruntime-web {VERSION}: its sha256 differs; "
                "remove the folder and try again"
            )
    return {name: folder / name for name in SHA256}


def _differing(folder: Path) -> list[str]:
    return [name for name, sha256 in SHA256.items() if _sha256(folder / name) != sha256]


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError:
        return None


def _download(folder: Path) -> None:
    """By npm, which knows the user's registry, proxy and certificates."""
    package = f"onnxruntime-web@{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="download-") as text:
        partial = Path(text)
        try:
            subprocess.run(
                ["npm", "pack", "--silent", package],
                cwd=partial,
                check=True,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            with tarfile.open(next(partial.glob("*.tgz")), mode="r|gz") as tar:
                for member in tar:
                    name = member.name.removeprefix("package/dist/")
                    if name in SHA256 and (source := tar.extractfile(member)):
                        with (partial / name).open("wb") as sink:
                            shutil.copyfileobj(source, sink)
        except (OSError, subprocess.SubprocessError, StopIteration, tarfile.TarError) as e:
            said = (getattr(e, "stderr", None) or str(e)).strip().splitlines() or ["no package"]
            raise MissingDependencyError(
                f"{package} cannot be fetched from npm: {said[0]}; install npm and connect to the network "
                f"once, or put {', '.join(SHA256)} of that npm package into {folder}"
            ) from None
        folder.mkdir(exist_ok=True)
        for name in SHA256:
            if (partial / name).is_file():
                (partial / name).replace(folder / name)
