"""A headless Chromium of a phone's size, and the bench that waits for it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from device_bench.browser.package import runtime_files
from edgeqkv.artifact import Golden, write_golden
from edgeqkv.errors import MissingDependencyError
from edgeqkv.model import Decoder
from export.golden import random_ids, reference_logits
from tests.device_bench import chromium

FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run")
PHONE = "--window-size=390,844"
SOFTWARE_GPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")


def needs_browser() -> str:
    """The program; skips the test without it, or without onnxruntime-web."""
    found = chromium.find()
    if found is None:
        pytest.skip("no Chromium here; apt-get install chromium")
    try:
        runtime_files()
    except MissingDependencyError as e:
        pytest.skip(str(e))
    return found


@contextlib.contextmanager
def browse(url: str, *flags: str, inside: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A browser with a profile of its own that shows ``url``; killed, all of it, in the end.

    inside: a command before the command, such as nsenter.
    """
    # Its children may still write into the profile while it is removed.
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            *inside,
            needs_browser(),
            *FLAGS,
            PHONE,
            f"--user-data-dir={profile}",
            *flags,
            url,
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, start_new_session=True, **quiet)
        try:
            yield process
        finally:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Bench:
    """``edgeqkv bench ... --device browser:WAY`` in a process of its own; ``url`` is its link."""

    def __init__(
        self,
        *arguments: object,
        way: str = "local",
        inside: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        needs_browser()
        code = "from edgeqkv.cli import main; main()"
        command = [sys.executable, "-c", code, "bench", *map(str, arguments)]
        self.process = subprocess.Popen(
            [*inside, *command, "--device", f"browser:{way}", "--processes", "1", "--seed", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.said = ""
        self.url = self.wait_for(r"open(?:ing| on the phone:) (http\S+)")[1]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read stderr until a line has ``pattern``."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"{pattern!r} was never said: {self.said}")

    def finish(self) -> tuple[int, str, str]:
        """(exit status, stdout, all of stderr)."""
        out, rest = self.process.communicate(timeout=240)
        assert "Traceback" not in rest, rest
        return self.process.returncode, out, self.said + rest

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()


def copy_with_golden(source: Path, target: Path, decoder: Decoder) -> Path:
    """A bundle of ``tests.onnx_bundles`` with golden vectors, free to be changed."""
    ids = random_ids(decoder, 12, seed=0)
    rows = reference_logits(decoder, ids, 8)
    shutil.copytree(source, target)
    write_golden(target, Golden(ids[:8], rows[0], ids[8:], rows[1:]))
    return target
