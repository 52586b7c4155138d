"""``edgeqkv device``: build what runs on a phone, and remove it from there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ACTIONS = ("build-runner", "clean")


def run(
    action: Annotated[str, typer.Argument(metavar="build-runner|clean")],
    abi: Annotated[str, typer.Option(help="arm64 or x86_64.")] = "arm64",
    backend: Annotated[str, typer.Option("-b", "--backend", help="onnx or executorch.")] = "onnx",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Copy the folder there.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="adb[:SERIAL] to clean. (default: every phone)")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace -o DIR.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """build-runner: a folder for phones with runner, runtime, C library and loader; bench makes it
    by itself. clean: remove all that bench left on a phone.

    Example: edgeqkv device build-runner --abi arm64 --backend onnx
    """
    from edgeqkv.errors import UsageError

    if action not in ACTIONS:
        raise UsageError(f"{action!r} is no action; allowed: {', '.join(ACTIONS)}")
    if action == "clean":
        _clean(device or "adb", as_json)
    else:
        _build(abi, backend, output, overwrite, as_json)


def _build(abi: str, backend: str, output: Path | None, overwrite: bool, as_json: bool) -> None:
    import shutil

    from device_bench.native.cross import build_folder
    from edgeqkv.console import human_bytes, print_json
    from edgeqkv.errors import of_flag
    from edgeqkv.files import new_folder, refuse_existing

    if output is not None:
        refuse_existing(output, overwrite)
    with of_flag("--backend"):
        folder = build_folder(abi, backend)
    path = folder.path
    if output is not None:
        with new_folder(output, overwrite=overwrite) as new:
            shutil.copytree(folder.path, new, dirs_exist_ok=True)
        path = output
    nbytes = sum(entry.nbytes for entry in folder.files.values())
    if as_json:
        print_json({"path": str(path), "abi": abi, "backend": backend, "nbytes": nbytes})
    else:
        print(f"{path}  {human_bytes(nbytes)}, {len(folder.files)} files")


def _clean(device: str, as_json: bool) -> None:
    from device_bench.adb import store
    from device_bench.adb.client import Adb, listed
    from edgeqkv.console import print_json
    from edgeqkv.errors import UsageError

    kind, _, serial = device.partition(":")
    if kind != "adb":
        raise UsageError(f"--device is {device!r}; allowed: adb, adb:SERIAL")
    serials = [serial] if serial else [d.serial for d in listed() if d.state == "device"]
    for each in serials:
        phone = Adb(each)
        phone.check_there()
        store.remove(phone)
    if as_json:
        print_json({"cleaned": serials})
    else:
        print("\n".join(f"{s}: clean" for s in serials) or "no device to clean")
