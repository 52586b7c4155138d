"""Run one worker process to its end. The parent blocks in waitpid: it never polls."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The runtimes bring their own kernels; numpy's threads would only spin beside them (the interpreter
# of Core ML programs took 16 s instead of 3 s beside another busy process).
_QUIET_BLAS = {"OPENBLAS_NUM_THREADS": "1"}


class JobFailed(Exception):
    """The worker refused, crashed, was killed or hung; the message is the reason, one line."""


def run_job(
    job: Mapping[str, Any], *, timeout_s: float | None = None, env: Mapping[str, str] | None = None
) -> Any:
    """The value that ``device_bench.worker`` computes for ``job`` in a fresh process.

    The process has a session of its own: Ctrl-C reaches the parent, which then kills all of it.

    Raises:
        JobFailed: no value came.
    """
    with tempfile.TemporaryDirectory(prefix="edgeqkv-bench-") as folder:
        job_path, result = Path(folder, "job.json"), Path(folder, "result.json")
        job_path.write_text(json.dumps(job), "utf-8")
        # -P: a folder called `export` where the user happens to stand must not shadow ours.
        command = [sys.executable, "-P", "-m", "device_bench.worker", str(job_path), str(result)]
        env = {**_QUIET_BLAS, **(env or {})}
        return run_process(command, result, timeout_s=timeout_s, env=env)


def run_process(
    command: Sequence[str],
    result: Path,
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Any:
    """The value that ``command`` writes to ``result``, {"value": ...} or {"error": one line}.

    Raises:
        JobFailed: no value came.
    """
    log = result.with_name("log")
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
        late = threading.Event()
        timer = threading.Timer(timeout_s or 0, _give_up, (process, late))
        if timeout_s is not None:
            timer.start()
        try:
            status = process.wait()
        finally:
            timer.cancel()
            _kill(process)
            process.wait()
    output = log.read_text("utf-8", "replace")
    if os.environ.get("EDGEQKV_TRACEBACK"):
        sys.stderr.write(output)
    if not result.exists():
        raise JobFailed(_reason(status, output, timeout_s if late.is_set() else None))
    outcome = json.loads(result.read_text("utf-8"))
    if "error" in outcome:
        raise JobFailed(outcome["error"])
    return outcome["value"]


def _give_up(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker's whole process group, whatever is left of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _reason(status: int, output: str, timeout_s: float | None) -> str:
    if timeout_s is not None:
        return f"hung: no result after {timeout_s:g} s (--timeout)"
    last = (output.strip().splitlines() or [""])[-1][:200]
    said = f": {last}" if last else ""
    if status == -signal.SIGKILL:
        return f"killed by SIGKILL, as the kernel does when memory runs out{said}"
    if status < 0:
        return f"crashed with {signal.Signals(-status).name}{said}"
    return f"ended without a result, exit status {status}{said}"
