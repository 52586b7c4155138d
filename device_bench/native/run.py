"""Run the native runner on this machine: its job in a folder of its own, a process, its result."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from device_bench.jobs import JobFailed, run_process
from device_bench.memory import METHOD
from device_bench.native.job import JOB, check_supported, write_job
from edgeqkv.artifact import inside, read_artifact
from edgeqkv.errors import EdgeQKVError

# A backend -> (how the runner is started, the runtime's library as it will see it).
Start = Callable[[str], tuple[list[str], str]]


def run_here(job: Mapping[str, Any], timeout_s: float | None, start: Start) -> Any:
    """The value of ``job``, as ``device_bench.worker.run`` has it.

    Raises:
        JobFailed: the bundle is refused, the runner cannot be made, or it brought no value.
    """
    bundle = Path(job["bundle"])
    with tempfile.TemporaryDirectory(prefix="edgeqkv-native-") as folder:
        try:
            artifact = read_artifact(bundle, check_sha256=False)
            check_supported(artifact, job["bundle"])
            command, library = start(artifact.backend)
            model = str(inside(bundle, artifact.entry).resolve())
            page = mmap.PAGESIZE
            write_job(Path(folder), artifact, bundle, job, model=model, library=library, page=page)
        except EdgeQKVError as e:
            raise JobFailed(str(e)) from None
        result = Path(folder, "result.json")
        # Runtimes write to their user's folders (ONNX Runtime makes ~/.cache): they are the job's.
        env = {"HOME": folder, "TMPDIR": folder}
        value = run_process(
            [*command, JOB, result.name], result, timeout_s=timeout_s, env=env, cwd=Path(folder)
        )
    return with_method(job, value)


def with_method(job: Mapping[str, Any], value: Any) -> Any:
    """The native runner reads memory as ``device_bench.memory`` does; the line says so."""
    return {**value, "method": METHOD} if job["pass"] == "memory" and value else value
