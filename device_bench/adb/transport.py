"""Run jobs of the sweep on a phone: copy, run under a limit, fetch the result, clean up."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_bench.adb import store
from device_bench.adb.client import Adb, check_serial, listed, what_to_do
from device_bench.adb.phone import ROOT, conditions_of, device_of, fixed_facts, read_phone
from device_bench.conditions import Conditions, Device
from device_bench.devices import DeviceLost, Transport
from device_bench.jobs import JobFailed
from device_bench.native.build import PROGRAM
from device_bench.native.cross import RunnerFolder, abi_of, build_folder
from device_bench.native.job import JOB, check_supported, write_job
from device_bench.native.run import with_method
from edgeqkv.artifact import MANIFEST, Artifact, file_entry, read_artifact
from edgeqkv.console import human_bytes, note
from edgeqkv.errors import EdgeQKVError, UsageError

LONGEST_S = 1800  # a runner that nobody waits for any more ends itself after this
GRACE_S = 30
_SIGNALS = {
    132: "crashed with SIGILL, an instruction that this CPU lacks",
    134: "crashed with SIGABRT",
    135: "crashed with SIGBUS",
    137: "killed by SIGKILL, as Android does when memory runs out",
    139: "crashed with SIGSEGV",
    142: "hung: it ended itself at its time limit",
    143: "killed by SIGTERM",
}


def open_devices(argument: str | None, engine: str | None) -> Sequence[Transport]:
    """The phone with the serial ``argument``, or every phone that adb can use.

    Raises:
        UsageError: an engine other than native. EdgeQKVError: no such phone, or it cannot be used.
    """
    if engine not in (None, "native"):
        raise UsageError(f"--engine is {engine!r}; allowed with --device adb: native")
    found = {d.serial: d.state for d in listed()}
    if argument is not None:
        Adb(check_serial(argument)).check_there()
        return [AdbDevice(argument)]
    usable = [serial for serial, state in found.items() if state == "device"]
    if not usable:
        others = "; ".join(f"{s} is {state}: {what_to_do(state)}" for s, state in found.items())
        raise EdgeQKVError(others or "adb sees no device; connect one with USB debugging on")
    return [AdbDevice(serial) for serial in usable]


class AdbDevice:
    """See ``device_bench.devices.Transport``."""

    engine = "native"

    def __init__(self, serial: str) -> None:
        self._adb = Adb(serial)
        self._fixed = fixed_facts(self._adb)
        self._phone = read_phone(self._adb, self._fixed)
        self._synced: set[str] = set()
        self._runners: dict[str, RunnerFolder] = {}
        # Names of this process's own: two benches may use one phone one after the other.
        self._job = f"job-{os.getpid()}"
        self.cores: tuple[int, ...] | None = None
        self._closed = False
        emulated = "emulated: the memory is the emulator's too, not the runtime's alone"
        self.no_memory = emulated if self._phone.emulated else None

    def describe(self) -> Device:
        return device_of(self._phone)

    def conditions(self, threads: int) -> Conditions:
        self._phone = read_phone(self._adb, self._fixed)
        return conditions_of(self._phone, threads, self.cores)

    def run(self, job: Mapping[str, Any], timeout_s: float | None) -> Any:
        bundle = Path(job["bundle"])
        if self._closed:
            raise DeviceLost(f"{self._adb.serial} is closed")
        try:
            artifact = read_artifact(bundle, check_sha256=False)
            check_supported(artifact, job["bundle"])
            runner = self._runner(artifact.backend)
            self._check_memory(artifact)
            folder = self._sync_bundle(artifact, bundle)
            with tempfile.TemporaryDirectory(prefix="edgeqkv-adb-") as local:
                limit = int(timeout_s + 1) if timeout_s else LONGEST_S
                write_job(
                    Path(local),
                    artifact,
                    bundle,
                    job,
                    model=f"../{folder}/{artifact.entry}",
                    library=f"../{_name(runner)}/lib/{runner.library}" if runner.library else "",
                    page=self._phone.page_size or 16384,
                    limit_s=limit,
                    cores=self.cores or (),
                )
                return with_method(job, self._run(Path(local), runner, limit))
        except DeviceLost:
            raise
        except EdgeQKVError as e:
            raise JobFailed(str(e)) from None

    def pin(self, cores: tuple[int, ...]) -> None:
        self.cores = cores

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._kill(f"{ROOT}/{self._job}")

    def _runner(self, backend: str) -> RunnerFolder:
        if backend not in self._runners:
            runner = build_folder(abi_of(self._phone.abi), backend)
            store.sync(self._adb, self._phone, runner.path, runner.files, _name(runner))
            programs = [f"{ROOT}/{_name(runner)}/{p}" for p in _programs(runner)]
            self._adb.shell("chmod 755 " + " ".join(map(shlex.quote, programs)))
            self._runners[backend] = runner
        return self._runners[backend]

    def _sync_bundle(self, artifact: Artifact, bundle: Path) -> str:
        """The model's files on the phone; the golden vectors travel with each job."""
        folder = f"bundle-{file_entry(bundle / MANIFEST).sha256[:16]}"
        if folder not in self._synced:
            skipped = ("golden.safetensors", "tokenizer.json")
            files = {n: e for n, e in artifact.files.items() if n not in skipped}
            store.sync(self._adb, self._phone, bundle, files, folder)
            self._synced.add(folder)
        return folder

    def _check_memory(self, artifact: Artifact) -> None:
        """A static cache is paid in full; weights that are mapped can still be dropped."""
        cache = artifact.cache.nbytes if artifact.cache_mode == "static" else 0
        need, have = artifact.nbytes + cache, self._phone.available_bytes
        if have is not None and need > have:
            raise EdgeQKVError(
                f"{self._adb.serial} has {human_bytes(have)} of memory available, the bundle needs "
                f"{human_bytes(need)}; close apps, or export a smaller one"
            )

    def _run(self, local: Path, runner: RunnerFolder, limit: int) -> Any:
        where, home = f"{ROOT}/{self._job}", f"../{_name(runner)}"
        store.remove(self._adb, self._job)
        for path in (local, *sorted(local.iterdir())):
            path.chmod(0o755 if path.is_dir() else 0o644)
        self._adb.push(local, where)  # a folder that is not there yet becomes this one
        loader, program = (f"{home}/{p}" for p in _programs(runner))
        command = f"{loader} --library-path {home}/lib {program} {JOB} result.json"
        # Runtimes write to their user's folders (ONNX Runtime makes ~/.cache): they are the job's.
        script = (
            f"cd {where} && export HOME={where} TMPDIR={where} && echo $$ > pid && exec {command}"
        )
        try:
            status, last, late = self._adb.stream(script, self._progress, timeout_s=limit + GRACE_S)
        except BaseException:
            self._kill(where)
            raise
        result = local / "result.json"
        if self._adb.pull(f"{where}/result.json", result):
            outcome = json.loads(result.read_text("utf-8"))
            store.remove(self._adb, self._job)
            if "error" in outcome:
                raise JobFailed(outcome["error"])
            return outcome["value"]
        self._adb.check_there()
        self._kill(where)
        raise JobFailed(_reason(status, last, limit if late else None))

    def _progress(self, line: str) -> None:
        """Show the runner's own lines, which start so; the runtimes' logs are theirs."""
        if line.startswith("> "):
            note(f"{self._adb.serial}: {line[2:]}")

    def _kill(self, where: str) -> None:
        with contextlib.suppress(EdgeQKVError):
            self._adb.shell(f"kill -9 $(cat {where}/pid) 2>/dev/null; rm -rf {where}")


def _name(runner: RunnerFolder) -> str:
    return f"runner-{runner.sha256[:16]}"


def _programs(runner: RunnerFolder) -> tuple[str, str]:
    return f"lib/{runner.loader}", f"bin/{PROGRAM}"


def _reason(status: int, last: str, limit: int | None) -> str:
    said = f": {last[:200]}" if last else ""
    if limit is not None:
        return f"hung: no result after {limit} s (--timeout)"
    if status in (126, 127):
        return f"the runner does not start on this device (wrong ABI, or a file is gone){said}"
    return f"{_SIGNALS.get(status, f'ended without a result, exit status {status}')}{said}"
