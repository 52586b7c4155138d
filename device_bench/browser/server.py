"""The server behind the page: one token, one browser, a fixed list of files, two kinds of post.

Everything lives under ``/TOKEN/``. The page claims the session with one post and gets a cookie;
from then on only that browser is answered. Jobs go out over one stream of server-sent events, which
also shows when the browser is gone; results come back as JSON, checked before they are believed.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from device_bench.devices import DeviceLost
from device_bench.jobs import JobFailed
from edgeqkv.errors import EdgeQKVError, SpecError

MAX_POST_BYTES = {"claim": 1 << 16, "result": 1 << 24}
BEAT_S = 1.0  # a dead connection shows at the second write after it died
GONE_S = 8.0  # without a stream; a reload or a change of network takes less
SOCKET_S = 30.0  # a client that stops in the middle of a request
CHUNK = 1 << 18
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".wasm": "application/wasm",
}
# COOP and COEP isolate the page, without which a browser gives it no threads and a coarse clock.
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; "
    "style-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclasses.dataclass
class Session:
    """What the handler threads and the bench share, under ``changed``.

    client: the cookie of the browser that claimed the link. job: what it has to run, with its id;
    sent: the id of the last job that went out; broken: of one whose page was loaded anew while it
    ran; outcome: what the page said. streams: open event streams; gone_since: when the last closed.
    """

    token: str
    read_claim: Callable[[Any], Any]
    read_result: Callable[[Any], Any]
    public: dict[str, Path]
    private: dict[str, Path] = dataclasses.field(default_factory=dict)
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    client: str | None = None
    claim: Any = None
    job: dict[str, Any] | None = None
    sent: int | None = None
    broken: int | None = None
    outcome: Any = None
    streams: int = 0
    gone_since: float = 0.0
    ended: bool = False


class Handler(BaseHTTPRequestHandler):
    """One connection. Whatever it does not know gets a status and no word more."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "edgeqkv", ""
    timeout = SOCKET_S

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        session = self.server.session
        name = self._name()
        if name is None:
            self._refuse(404)
        elif name in session.public:
            self._file(session.public[name])
        elif not self._is_client():
            self._refuse(403)
        elif name == "events":
            self._events()
        elif name in session.private:
            self._file(session.private[name])
        else:
            self._refuse(404)

    def do_POST(self) -> None:
        name = self._name()
        if name not in MAX_POST_BYTES:
            self._refuse(404)
        elif name != "claim" and not self._is_client():
            self._refuse(403)
        elif (data := self._json(MAX_POST_BYTES[name])) is None:
            pass
        elif name == "claim":
            self._claim(data)
        else:
            self._result(data)

    def _name(self) -> str | None:
        """What comes after the token; None without the right one. Never a path of this machine."""
        _, token, *rest = (self.path.partition("?")[0] + "//").split("/", 2)
        good = hmac.compare_digest(token.encode(), self.server.session.token.encode())
        return rest[0].removesuffix("//").removesuffix("/") if good else None

    def _is_client(self) -> bool:
        client = self.server.session.client
        pairs = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        given = next((value for name, _, value in pairs if name == "edgeqkv"), "")
        return client is not None and hmac.compare_digest(given.encode(), client.encode())

    def _json(self, most: int) -> Any:
        """The body, or None once it was refused."""
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not length.isdigit():
            return self._refuse(411)
        if int(length) > most:
            return self._refuse(413)
        if self.headers.get_content_type() != "application/json":
            return self._refuse(415)
        try:
            data = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            return self._refuse(400)
        return data if data is not None else self._refuse(400)

    def _claim(self, data: Any) -> None:
        session = self.server.session
        try:
            claim = session.read_claim(data)
        except SpecError as e:
            return self._refuse(400, str(e))
        with session.changed:
            if session.client is not None and not self._is_client():
                return self._refuse(409)
            session.client = session.client or secrets.token_urlsafe(24)
            session.claim = session.claim or claim
            if session.job is not None and session.job["id"] == session.sent:
                session.broken = session.sent
            session.gone_since = time.monotonic()
            session.changed.notify_all()
        flags = f"Path=/{session.token}/; HttpOnly; SameSite=Strict"
        return self._answer(204, {"Set-Cookie": f"edgeqkv={session.client}; {flags}"})

    def _result(self, data: Any) -> None:
        session = self.server.session
        try:
            outcome = session.read_result(data)
        except SpecError as e:
            return self._refuse(400, str(e))
        with session.changed:
            if session.job is not None and session.job["id"] == outcome.id:
                session.outcome = outcome
                session.changed.notify_all()
        return self._answer(204)

    def _events(self) -> None:
        """Send each job as it comes, a line each second to see whether someone listens."""
        session = self.server.session
        self.close_connection = True
        self._head(200, {"Content-Type": "text/event-stream", "Connection": "close"})
        with session.changed:
            session.streams += 1
            session.changed.notify_all()
        sent = None
        try:
            while not session.ended:
                job = self._next(sent)
                if job is not None:
                    sent = session.sent = job["id"]
                    self.wfile.write(b"event: job\ndata: " + json.dumps(job).encode() + b"\n\n")
                else:
                    self.wfile.write(b":\n\n")
            self.wfile.write(b"event: end\ndata: {}\n\n")
        except OSError:
            pass
        finally:
            with session.changed:
                session.streams -= 1
                session.gone_since = time.monotonic()
                session.changed.notify_all()

    def _next(self, sent: int | None) -> dict[str, Any] | None:
        """The job to run where it is another than ``sent``; None when a beat passed without one."""
        session = self.server.session

        def is_new() -> bool:
            return session.job is not None and session.job["id"] != sent

        with session.changed:
            session.changed.wait_for(lambda: session.ended or is_new(), BEAT_S)
            return session.job if is_new() else None

    def _file(self, path: Path) -> None:
        with path.open("rb") as f:
            kind = TYPES.get(path.suffix, "application/octet-stream")
            size = path.stat().st_size
            self._head(200, {"Content-Type": kind, "Content-Length": str(size)})
            while chunk := f.read(CHUNK):
                self.wfile.write(chunk)

    def _refuse(self, status: int, why: str = "") -> None:
        """An error ends the connection: its body may not have been read."""
        self.close_connection = True
        self._answer(status, {"Connection": "close"}, why.encode())

    def _answer(self, status: int, headers: Mapping[str, str] = {}, body: bytes = b"") -> None:
        length = {} if status == 204 else {"Content-Length": str(len(body))}
        self._head(status, {**headers, **length, "Content-Type": "text/plain; charset=utf-8"})
        self.wfile.write(body)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Cache-Control": "no-store", **headers}.items():
            self.send_header(name, value)
        self.end_headers()


class PageServer(ThreadingHTTPServer):
    """Serves ``session`` in threads of its own until :meth:`stop`."""

    daemon_threads = True

    def __init__(self, address: str, session: Session, certificate: Path | None = None) -> None:
        super().__init__((address, 0), Handler)
        self.session = session
        self._one_job = threading.Lock()
        self.tls = None
        if certificate is not None:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(certificate)
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's thread: a client that never shakes hands holds up nobody."""
        if self.tls is not None:
            request.settimeout(SOCKET_S)
            request = self.tls.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A broken connection is the client's affair; nothing of it belongs in a terminal."""

    def wait_for_claim(self, timeout_s: float) -> Any:
        """What the first browser to open the link says about itself.

        Raises:
            EdgeQKVError: nobody came.
        """
        session = self.session
        with session.changed:
            if not session.changed.wait_for(lambda: session.streams > 0, timeout_s):
                raise EdgeQKVError(
                    f"no browser opened the link within {timeout_s:g} s; is the phone in the same "
                    "network, and does a firewall let it reach this computer?"
                )
        return session.claim

    def run(self, job: dict[str, Any], timeout_s: float | None) -> Any:
        """Hand ``job`` to the page and wait for what it says; one job at a time.

        Raises:
            JobFailed: the page was loaded anew meanwhile, or no answer came in ``timeout_s``.
            DeviceLost: the browser is gone.
        """
        session = self.session
        with self._one_job, session.changed:
            end = None if timeout_s is None else time.monotonic() + timeout_s
            session.job, session.outcome = job, None
            session.changed.notify_all()
            try:
                while session.outcome is None:
                    session.changed.wait(0.2)
                    if session.outcome is None:
                        self._check_alive(job, end, timeout_s)
                return session.outcome
            finally:
                session.job = None

    def _check_alive(self, job: dict[str, Any], end: float | None, timeout_s: float | None) -> None:
        session, now = self.session, time.monotonic()
        if session.broken == job["id"]:
            raise JobFailed(
                "the page was loaded again while it ran: by hand, or because it had crashed, as "
                "pages do when memory runs out"
            )
        if end is not None and now > end:
            raise JobFailed(f"hung: no result after {timeout_s:g} s (--timeout)")
        if session.ended or (not session.streams and now - session.gone_since > GONE_S):
            raise DeviceLost(
                "the browser is gone: its page was closed, or the phone lost the network; what is "
                "missing can be measured with --resume"
            )

    def stop(self) -> None:
        """Tell the page that it is over, and close; does nothing the second time."""
        session = self.session
        with session.changed:
            if session.ended:
                return
            session.ended = True
            session.changed.notify_all()
            session.changed.wait_for(lambda: session.streams == 0, 3)
        self.shutdown()
        self.server_close()
