"""Artifact: the manifest of a bundle, the only contract between export and device_bench.

A bundle is a folder with ``manifest.json``, the files of one backend, ``golden.safetensors``
and, when the model has one, ``tokenizer.json``. No torch here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeqkv.cache import CacheSpec
from edgeqkv.errors import BundleError, SpecError
from edgeqkv.quant import Quantisation
from edgeqkv.spec import ModelSpec, check_keys

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
GOLDEN = "golden.safetensors"
TOKENIZER = "tokenizer.json"
CACHE_MODES = ("growing", "static", "none")
AGAIN = "export it again"
MAKE_ONE = "give a bundle, which `edgeqkv export MODEL_DIR -o OUT` writes as OUT/<backend>"


@dataclasses.dataclass(frozen=True)
class FileEntry:
    sha256: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Artifact:
    """What one bundle claims to be.

    cache_mode: ``growing`` memory follows the context; ``static`` it is paid at load for
        ``capacity`` tokens; ``none`` no cache (a model that is not causal).
    formulation: how attention reads the cache, e.g. ``gemm-prefix``.
    capacities: contexts a static bundle can be loaded with, ascending; the last is the cache's.
    prefill_chunk: most tokens that one call of the program takes.
    entry: the model file (or folder, for an .mlpackage) inside the bundle.
    weights: short name of the recipe in ``quantisation``, for tables.
    details: figures of the backend's own, e.g. planned memory in bytes.
    """

    backend: str
    entry: str
    model: ModelSpec
    cache: CacheSpec
    cache_mode: str
    formulation: str
    weights: str
    capacities: tuple[int, ...]
    prefill_chunk: int
    files: Mapping[str, FileEntry]
    tools: Mapping[str, str]
    details: Mapping[str, Any]
    name: str = ""
    quantisation: Quantisation = dataclasses.field(default_factory=Quantisation)

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}

    @property
    def nbytes(self) -> int:
        """Bytes of the model's own files: no manifest, golden vectors or tokenizer."""
        extra = (GOLDEN, TOKENIZER)
        return sum(f.nbytes for name, f in self.files.items() if name not in extra)

    @property
    def stored_weights(self) -> str:
        """What the weights are in the file: Core ML keeps floats in what it computes in."""
        return str(self.details.get("stored_weights", self.weights))

    @property
    def numerics(self) -> str:
        """The coarsest number format that the bundle computes with: int4, int8, fp16 or fp32."""
        found = {
            self.cache.dtype,
            *self.quantisation.recipe.schemes,
            self.details.get("compute_precision"),
        }
        return next((name for name in ("int4", "int8", "fp16") if name in found), "fp32")


@dataclasses.dataclass(frozen=True)
class Golden:
    """Reference logits computed by the eager model in float32.

    prompt_ids [S] int64; prefill_logits [V] of the prompt's last token; decode_ids [n] int64 fed
    one by one after it; decode_logits [n, V].
    """

    prompt_ids: NDArray[np.int64]
    prefill_logits: NDArray[np.float32]
    decode_ids: NDArray[np.int64]
    decode_logits: NDArray[np.float32]


def file_entry(path: Path) -> FileEntry:
    """Hash one file without holding it in memory."""
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256")
    return FileEntry(digest.hexdigest(), path.stat().st_size)


def inside(bundle: Path, name: str) -> Path:
    """The path of a file the manifest names; refuses absolute paths, ``..`` and links out of the bundle."""
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise BundleError(
            f"{bundle}: manifest names {name!r}, which is outside the bundle; {AGAIN}"
        )
    path = bundle / pure
    if not path.resolve().is_relative_to(bundle.resolve()):
        raise BundleError(f"{bundle}: {name!r} is a link out of the bundle; {AGAIN}")
    return path


def read_artifact(bundle: Path, *, check_sha256: bool = True) -> Artifact:
    """Read and check ``manifest.json`` and every file that it lists.

    Raises:
        BundleError: no manifest, an unknown schema version, a missing, altered or foreign file.
    """
    path = bundle / MANIFEST
    if not bundle.exists():
        raise BundleError(f"{bundle} does not exist; {MAKE_ONE}")
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise BundleError(f"{bundle} is not a bundle: it has no {MANIFEST}; {MAKE_ONE}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise BundleError(f"{path} is not valid JSON: {e}; export the bundle again") from None
    except NotADirectoryError:
        raise BundleError(f"{bundle} is not a bundle: it is a file; {MAKE_ONE}") from None
    try:
        artifact = _from_dict(data)
    except SpecError as e:
        raise BundleError(f"{path}: {e}; export the bundle again") from None
    for name, entry in artifact.files.items():
        _check_file(bundle, name, entry, check_sha256)
    inside(bundle, artifact.entry)
    return artifact


def _check_file(bundle: Path, name: str, entry: FileEntry, check_sha256: bool) -> None:
    path = inside(bundle, name)
    if not path.is_file():
        raise BundleError(f"{bundle}: {name} is missing; export the bundle again")
    if path.stat().st_size != entry.nbytes:
        raise BundleError(
            f"{bundle}: {name} has {path.stat().st_size} bytes, manifest says {entry.nbytes}; "
            "the bundle was altered or cut short, export it again"
        )
    if check_sha256 and file_entry(path).sha256 != entry.sha256:
        raise BundleError(
            f"{bundle}: {name} does not match its sha256 in the manifest; export it again"
        )


def _from_dict(data: Any) -> Artifact:
    fields = frozenset(f.name for f in dataclasses.fields(Artifact)) | {"schema_version"}
    check_keys("manifest", data, fields, fields)
    data = dict(data)
    if (version := data.pop("schema_version")) != SCHEMA_VERSION:
        raise SpecError(f"schema_version is {version!r}; this edgeqkv reads {SCHEMA_VERSION}")
    for key in ("backend", "entry", "cache_mode", "formulation", "weights", "name"):
        if not isinstance(data[key], str):
            raise SpecError(f"{key} is {data[key]!r}; it must be a string")
    if data["cache_mode"] not in CACHE_MODES:
        raise SpecError(f"cache_mode is {data['cache_mode']!r}; allowed: {', '.join(CACHE_MODES)}")
    for key in ("files", "tools", "details"):
        if not isinstance(data[key], dict):
            raise SpecError(f"{key} must be a JSON object")
    data["model"] = ModelSpec.from_dict(data["model"])
    data["cache"] = CacheSpec.from_dict(data["cache"])
    data["quantisation"] = Quantisation.from_dict(data["quantisation"])
    if data["weights"] != (label := data["quantisation"].recipe.label):
        raise SpecError(f"weights is {data['weights']!r}, but its recipe is {label}")
    data["files"] = {name: _file_entry(name, entry) for name, entry in data["files"].items()}
    data["capacities"] = _capacities(data["capacities"], data["cache"])
    if not _is_count(data["prefill_chunk"]):
        raise SpecError(
            f"prefill_chunk is {data['prefill_chunk']!r}; it must be a positive integer"
        )
    return Artifact(**data)


def _file_entry(name: str, entry: Any) -> FileEntry:
    keys = frozenset({"sha256", "nbytes"})
    check_keys(f"file {name!r}", entry, keys, keys)
    if not isinstance(entry["sha256"], str) or not isinstance(entry["nbytes"], int):
        raise SpecError(f"file {name!r} needs a sha256 string and an nbytes integer")
    return FileEntry(**entry)


def _capacities(value: Any, cache: CacheSpec) -> tuple[int, ...]:
    ok = isinstance(value, list) and value and all(_is_count(v) for v in value)
    if not ok or sorted(value) != value or value[-1] != cache.capacity:
        raise SpecError(
            f"capacities is {value!r}; it must ascend to the cache's capacity {cache.capacity}"
        )
    return tuple(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_golden(bundle: Path) -> Golden:
    """Load the golden vectors of a bundle (safetensors: no code can hide in it).

    Raises:
        BundleError: they cannot be read, do not fit each other, or are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = bundle / GOLDEN
    try:
        golden = Golden(**load_file(path))
    except (SafetensorError, TypeError, OSError) as e:
        raise BundleError(f"{path} cannot be read: {e}; {AGAIN}") from None
    ids = (golden.prompt_ids, golden.decode_ids)
    logits = (golden.prefill_logits, golden.decode_logits)
    shapes = [list(array.shape) for array in (*ids, *logits)]
    size = golden.prefill_logits.size
    expected = [[max(1, ids[0].size)], [ids[1].size], [size], [ids[1].size, size]]
    if shapes != expected or not all(np.isfinite(rows).all() for rows in logits):
        raise BundleError(f"{path} holds {shapes}, expected {expected}, finite; {AGAIN}")
    if any(array.dtype != np.int64 for array in ids):
        raise BundleError(f"{path} holds ids of {ids[0].dtype}, expected int64; {AGAIN}")
    return golden


def write_golden(bundle: Path, golden: Golden) -> None:
    from safetensors.numpy import save_file

    arrays = {f.name: getattr(golden, f.name) for f in dataclasses.fields(Golden)}
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, bundle / GOLDEN)


def write_manifest(bundle: Path, artifact: Artifact) -> None:
    text = json.dumps(artifact.to_dict(), indent=2, allow_nan=False)
    (bundle / MANIFEST).write_text(text + "\n", "utf-8")
