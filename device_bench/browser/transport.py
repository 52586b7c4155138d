"""``--device browser``: open the link in any browser, and it runs the bench.

``browser`` is the page at this machine's address in the network, or, where one Android phone is
attached, at localhost on that phone (``adb reverse``). ``browser:lan``, ``browser:adb``,
``browser:https`` and ``browser:local`` choose; ``browser:adb:SERIAL`` chooses the phone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device_bench import conditions
from device_bench.browser import link
from device_bench.browser.facts import Claim, Outcome, device_of, read_outcome, samples_of
from device_bench.browser.package import runtime_files
from device_bench.browser.server import PageServer, Session
from device_bench.devices import Transport
from device_bench.jobs import JobFailed
from device_bench.runners.run_onnx import LEAST_CHUNK, SCORE_BYTES
from device_bench.schema import build
from device_bench.workload import Workload
from edgeqkv.artifact import (
    GOLDEN,
    TOKENIZER,
    Artifact,
    file_entry,
    inside,
    read_artifact,
    read_golden,
)
from edgeqkv.console import note
from edgeqkv.errors import EdgeQKVError, UsageError
from edgeqkv.limits import THRESHOLDS

PAGE = Path(__file__).with_name("page")
WAYS = ("lan", "adb", "https", "local")
ENGINES = ("wasm", "webgpu")
FORMULATIONS = ("gemm-prefix", "gqa-aliased", "full")
DTYPES = ("fp32", "fp16")
OPEN_S = 300.0  # for a person to find the phone and point it at the code
MOST_THREADS = 4  # more than a phone has fast cores; -t asks for others
ISOLATE = "open the page by https or from this machine: --device browser:https, browser:adb"


def open_devices(argument: str | None, engine: str | None) -> Sequence[Transport]:
    """See ``device_bench.devices.TransportModule``: a device for wasm, one for WebGPU where it is."""
    way, _, serial = (argument or "").partition(":")
    if (way and way not in WAYS) or (serial and way != "adb"):
        raise UsageError(
            f"--device is browser:{argument}; allowed: browser, "
            + ", ".join(f"browser:{w}" for w in WAYS)
            + ", browser:adb:SERIAL"
        )
    if engine not in (None, *ENGINES):
        raise UsageError(
            f"--engine is {engine!r}; allowed with --device browser: {', '.join(ENGINES)}"
        )
    link_ = Link(way, serial or None)
    try:
        claim = link_.wait()
        engines = [engine] if engine else ["wasm"] + ["webgpu"] * (claim.gpu is not None)
        if engine == "webgpu" and claim.gpu is None:
            raise EdgeQKVError(f"--engine webgpu: {claim.no_gpu}; use --engine wasm")
    except BaseException:
        link_.close()
        raise
    return [Page(link_, claim, name) for name in engines]


class Link:
    """The server, and the way to it; shared by the engines of one browser."""

    def __init__(self, way: str, serial: str | None) -> None:
        self._stack = contextlib.ExitStack()
        self.folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeqkv-browser-"))
        )
        self.numbers = itertools.count(1)
        try:
            self._open(way, serial)
        except BaseException:
            self.close()
            raise

    def _open(self, way: str, serial: str | None) -> None:
        runtime = runtime_files()
        phone = link.attached_phone(serial) if way in ("", "adb") else None
        if way == "adb" and phone is None:
            raise EdgeQKVError(
                f"--device browser:adb: {serial or 'no single Android phone'} is not attached and "
                "authorised; see `adb devices`, or use --device browser:lan"
            )
        address = "127.0.0.1" if way == "local" or phone else link.lan_address()
        certificate = link.certificate(self.folder, address) if way == "https" else None
        self.session = Session(
            token=secrets.token_urlsafe(16),
            read_claim=lambda data: build(Claim, data, "claim"),
            read_result=read_outcome,
            public={"": PAGE / "index.html"}
            | {path.name: path for path in PAGE.iterdir() if path.name != "index.html"}
            | {f"ort/{name}": path for name, path in runtime.items()},
        )
        self.server = PageServer(address, self.session, certificate)
        self._stack.callback(self.server.stop)
        if phone:
            port = link.reverse(phone, self.server.port)
            self._stack.callback(link.unreverse, phone, port)
            self.url = f"http://localhost:{port}/{self.session.token}/"
            note(f"opening {self.url} on {phone} (adb reverse)")
            link.open_on(phone, self.url)
            return
        scheme = "https" if certificate else "http"
        self.url = f"{scheme}://{address}:{self.server.port}/{self.session.token}/"
        link.show_link(self.url)
        if certificate:
            note(
                "the browser will warn: the certificate is our own, of SHA-256 "
                + link.fingerprint(certificate)
            )

    def wait(self) -> Claim:
        claim: Claim = self.server.wait_for_claim(OPEN_S)
        note(f"connected: {claim.user_agent}")
        return claim

    def close(self) -> None:
        self._stack.close()


class Page:
    """See ``device_bench.devices.Transport``."""

    no_memory: str | None = "a browser does not tell which pages of its memory are resident"

    def __init__(self, link_: Link, claim: Claim, engine: str) -> None:
        self._link, self._claim, self.engine = link_, claim, engine
        self._device = device_of(claim, engine)

    def describe(self) -> conditions.Device:
        return self._device

    def threads(self, asked: Sequence[int] | None) -> Sequence[int]:
        """wasm: 1 and, isolated, some more; the graphics processor has none to choose."""
        if self.engine == "webgpu":
            return [1]
        most = min(self._claim.cpu_count or 1, MOST_THREADS)
        return asked or ([1, most] if self._claim.cross_origin_isolated and most > 1 else [1])

    def conditions(self, threads: int) -> conditions.Conditions:
        """A page knows nothing of the state that its machine is in."""
        return conditions.Conditions(
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            cpu_model=None,
            governor=None,
            frequency_khz=None,
            temperature_c=None,
            load_average_1m=None,
            threads=threads,
            affinity=None,
            page_size=None,
            huge_pages=None,
            python=None,
            engine=self.engine,
        )

    def run(self, job: Mapping[str, Any], timeout_s: float | None) -> Any:
        workload: Workload = build(Workload, job["workload"], "workload")
        bundle = Path(job["bundle"])
        artifact = read_artifact(bundle, check_sha256=False)
        if reason := self._refusal(artifact, workload):
            raise JobFailed(reason)
        message = self._message(artifact, bundle, workload)
        outcome: Outcome = self._link.server.run(message, timeout_s)
        if outcome.error is not None:
            raise JobFailed(" ".join(outcome.error.split()) or "the page gave no reason")
        samples = dataclasses.asdict(samples_of(self._claim, outcome, self.engine))
        value = {"samples": samples, "engine": outcome.engine, "interpreted": False}
        return json.loads(json.dumps(value))  # as it comes from a process: lists, no tuples

    def _refusal(self, artifact: Artifact, workload: Workload) -> str | None:
        """Why the page cannot run it; None when it can."""
        if artifact.backend != "onnx" or artifact.formulation not in FORMULATIONS:
            return (
                f"a browser runs ONNX bundles of {', '.join(FORMULATIONS)}; this one is "
                f"{artifact.backend}, {artifact.formulation}"
            )
        if artifact.cache.dtype not in DTYPES:
            return f"cache dtype {artifact.cache.dtype} is not run in a browser; allowed: {', '.join(DTYPES)}"
        if (reason := workload.misfit(artifact.cache.capacity)) is not None:
            return reason
        if workload.n_gen and not artifact.model.is_causal:
            return f"{artifact.model.label} is not causal: it has no decode"
        if workload.n_threads > 1 and not self._claim.cross_origin_isolated:
            return f"{workload.n_threads} threads need a page that is isolated; {ISOLATE}"
        if artifact.formulation == "gemm-prefix" and self.engine == "webgpu":
            return (
                "WebGPU cannot bind the empty prefix that gemm-prefix starts with; export with "
                "--onnx-attention gqa, or use --engine wasm"
            )
        if artifact.cache.dtype == "fp16" and self.engine == "webgpu":
            gpu = self._claim.gpu
            if gpu is None or not gpu.fp16:
                return "this browser's WebGPU has no shader-f16, which an fp16 cache needs"
        return None

    def _message(self, artifact: Artifact, bundle: Path, workload: Workload) -> dict[str, Any]:
        """The job as page.js and worker.js read it; its files are served from now on.

        A name served has the hash of what it is in it: the page fetches each once.
        """
        cache, model = artifact.cache, artifact.model
        files = {
            name: f"bundle/{entry.sha256[:16]}/{name}"
            for name, entry in artifact.files.items()
            if name not in (GOLDEN, TOKENIZER)
        }
        private = self._link.session.private
        private.update({url: inside(bundle, name) for name, url in files.items()})
        golden = read_golden(bundle)
        known = file_entry(bundle / GOLDEN).sha256[:16]
        rows = self._link.folder / f"{known}.rows"
        stacked = np.vstack([golden.prefill_logits[None], golden.decode_logits])
        rows.write_bytes(np.ascontiguousarray(stacked, "<f4").tobytes())
        private[f"golden/{known}"] = rows
        threads = f"{workload.n_threads} thread{'s' * (workload.n_threads > 1)}"
        engine = "WebGPU" if self.engine == "webgpu" else f"wasm, {threads}"
        title = f"{artifact.model.label}, {cache.layout} cache"
        return {
            "id": next(self._link.numbers),
            "engine": self.engine,
            "correctness_only": self._device.emulated,
            "label": f"{title}: {workload.label}, {engine}",
            "title": title,
            "about": f"ONNX, {artifact.weights} weights, {artifact.formulation}, "
            f"{cache.bytes_per_token} bytes per token",
            "workload_label": workload.label,
            "engine_label": engine,
            "workload": dataclasses.asdict(workload),
            "ids": workload.ids(model.used_tokens).tolist(),
            "files": files,
            "golden": {
                "prompt_ids": golden.prompt_ids.tolist(),
                "decode_ids": golden.decode_ids.tolist(),
                "rows": f"golden/{known}",
                "vocab_size": model.vocab_size,
            },
            "bundle": {
                "entry": artifact.entry,
                "formulation": artifact.formulation,
                "vocab_size": model.vocab_size,
                "used_tokens": model.used_tokens,
                "num_attention_heads": model.num_attention_heads,
                "prefill_chunk": artifact.prefill_chunk,
                "score_bytes": SCORE_BYTES,
                "least_chunk": LEAST_CHUNK,
                "session_config": {"session.disable_prepacking": "1"},
                "limits": THRESHOLDS[artifact.numerics],
                "cache": {
                    "names": cache.names(),
                    "roles": cache.roles,
                    "heads": cache.num_key_value_heads,
                    "head_dim": cache.head_dim,
                    "capacity": cache.capacity,
                    "dtype": cache.dtype,
                    "itemsize": cache.itemsize,
                },
            },
        }

    def close(self) -> None:
        self._link.close()
