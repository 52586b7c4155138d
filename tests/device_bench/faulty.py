"""Runtimes that go wrong on purpose; the manifest's ``formulation`` says how; two of them only while
FAULTY_SHORT is in the environment. Run by test_bench
in real worker processes, registered as a plug-in (see ``plugin``)."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from device_bench import self_test
from edgeqkv.artifact import MANIFEST
from edgeqkv.errors import RunError


class FaultyRunner(self_test.SelfTestRunner):
    load_ns, prefill_ns_per_token, decode_ns = 0, 1000, 20_000

    def __init__(self, artifact, capacity):
        super().__init__(artifact, capacity)
        self.fault = artifact.formulation
        self.interpreted = self.fault == "interpreted"
        self._second = self_test._memory(self._rows.nbytes)
        self._copy = np.frombuffer(self._second, np.float32).reshape(self._rows.shape)

    def _append(self, ids, duration_ns):
        if self.fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "oom":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "short-of-memory" and "FAULTY_SHORT" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit":
            sys.stderr.write("the SDK gave up\n")
            sys.stderr.flush()
            os._exit(3)
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "refuse":
            raise RunError("operator Foo is not\nimplemented")
        new = slice(self.position, self.position + ids.size)
        if self.fault == "double":
            self._copy[:, new] = 1
        return super()._append(ids, duration_ns)

    def cache_regions(self):
        if self.fault == "silent":
            return None
        copy = (self._copy.ctypes.data, self._copy.nbytes)
        return [*super().cache_regions(), copy]

    def close(self):
        del self._copy
        self._second.close()
        super().close()


def load(artifact, directory, *, threads, capacity):
    return FaultyRunner(artifact, capacity)


@dataclasses.dataclass
class Facts:
    bytes_per_token: int


def read(artifact, directory):
    """An auditor: tells the truth, but for the fault ``declares-double``."""
    if artifact.formulation == "large-to-audit" and "FAULTY_SHORT" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    factor = 2 if artifact.formulation == "declares-double" else 1
    return Facts(artifact.cache.bytes_per_token * factor)


def plugin(folder: Path) -> dict[str, str]:
    """Install this module as a plug-in package in ``folder``; the environment that finds it."""
    info = folder / "faulty_runtime-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-runtime\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[edgeqkv.runners]\nfaulty = faulty:load\n\n[edgeqkv.auditors]\nfaulty = faulty:read\n"
    )
    (folder / "faulty.py").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def bundle(folder: Path, fault: str, cache_mode: str = "growing", **changes: object) -> Path:
    """A bundle of the faulty runtime; ``changes`` go into its manifest."""
    self_test.write_bundle(folder, cache_mode, backend="faulty")
    path = folder / MANIFEST
    manifest = {**json.loads(path.read_text()), "formulation": fault, "name": fault, **changes}
    path.write_text(json.dumps(manifest))
    return folder
