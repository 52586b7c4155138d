"""What the page's server refuses, and what it does when nobody comes or someone leaves."""

from __future__ import annotations

import hashlib
import http.client
import http.server
import json
import shutil
import socket
import ssl
import threading
import time

import pytest

from device_bench.browser import link, server, transport
from device_bench.browser.facts import Claim, read_outcome
from device_bench.browser.server import HEADERS, MAX_POST_BYTES, PageServer, Session
from device_bench.devices import DeviceLost, threads_of
from device_bench.jobs import JobFailed
from device_bench.schema import build
from edgeqkv.errors import EdgeQKVError, UsageError

TOKEN = "the-token"
CLAIM = {
    "user_agent": "Mozilla/5.0 (Linux; Android 16) Firefox/150.0",
    "cross_origin_isolated": True,
    "secure_context": True,
    "cpu_count": 8,
    "timer_resolution_ns": 5000,
    "platform": None,
    "platform_version": None,
    "architecture": None,
    "model": None,
    "gpu": None,
    "no_gpu": "the browser has no WebGPU",
}
RESULT = {
    "id": 1,
    "error": None,
    "engine": "onnxruntime-web wasm",
    "samples": {
        "import_ns": 1,
        "load_ns": 1,
        "first_call_ns": 1,
        "warmup": [1],
        "repetitions": [[1, 2]],
    },
    "heap_load_bytes": 1,
    "heap_bytes": 2,
    "cache_binding": "no cache",
}


@pytest.fixture
def page(tmp_path):
    """A server with a page, and a file that only the browser which claimed the link may have."""
    (tmp_path / "index.html").write_text("<p>hello")
    (tmp_path / "model.onnx").write_bytes(b"weights")
    (tmp_path / "secret.txt").write_text("not served")
    running = PageServer(
        "127.0.0.1",
        Session(
            token=TOKEN,
            read_claim=lambda data: build(Claim, data, "claim"),
            read_result=read_outcome,
            public={"": tmp_path / "index.html"},
            private={"bundle/1/model.onnx": tmp_path / "model.onnx"},
        ),
    )
    yield running
    running.stop()


def ask(page, method, path, body=None, **headers):
    """(status, headers, body) of one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    if data is not None:
        headers = {"Content-Type": "application/json"} | headers
    try:
        connection.request(method, path, data, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def claim(page):
    """The cookie of a browser that claims the link."""
    status, headers, _ = ask(page, "POST", f"/{TOKEN}/claim", CLAIM)
    assert status == 204
    assert "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
    return headers["Set-Cookie"].partition(";")[0]


def listen(page, cookie):
    """An open event stream, as EventSource has it; closing it closes its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    connection.request("GET", f"/{TOKEN}/events", headers={"Cookie": cookie})
    stream = connection.getresponse()
    connection.close()
    return stream


def next_event(stream):
    name = None
    while True:
        line = stream.readline().decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        if line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//",
        "/index.html",
        "/wrong/",
        f"/{TOKEN}x/",
        f"/{TOKEN[:-1]}/",
        "/secret.txt",
        f"/x/{TOKEN}/",
        "/../" + TOKEN + "/",
        "/%74he-token/",
    ],
)
def test_nothing_without_the_token(page, path):
    status, headers, body = ask(page, "GET", path)
    assert (status, body) == (404, b"")
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert ask(page, "POST", path.rstrip("/") + "/claim", CLAIM)[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "%2e%2e/secret.txt",
        "..%2fsecret.txt",
        "bundle/1/../../secret.txt",
        "bundle/1/%2e%2e/%2e%2e/secret.txt",
        "bundle//etc/passwd",
        "/etc/passwd",
        "bundle/1/model.onnx/../secret.txt",
        "bundle\\..\\secret.txt",
        "secret.txt",
        "ort/../secret.txt",
        "\0",
    ],
)
def test_no_path_but_those_of_the_list(page, path):
    cookie = claim(page)
    with socket.create_connection(("127.0.0.1", page.port), 10) as s:
        s.sendall(f"GET /{TOKEN}/{path} HTTP/1.1\r\nHost: x\r\nCookie: {cookie}\r\n\r\n".encode())
        answer = s.makefile("rb").read(4096)
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))
    assert b"not served" not in answer
    assert b"root:" not in answer


def test_the_page_is_isolated_and_the_model_is_for_one_browser(page):
    status, headers, body = ask(page, "GET", f"/{TOKEN}/")
    assert (status, body) == (200, b"<p>hello")
    assert all(headers[name] == value for name, value in HEADERS.items())
    model = f"/{TOKEN}/bundle/1/model.onnx"
    assert ask(page, "GET", model)[0] == 403
    assert ask(page, "GET", f"/{TOKEN}/events")[0] == 403
    assert ask(page, "POST", f"/{TOKEN}/result", RESULT)[0] == 403
    cookie = claim(page)
    assert ask(page, "GET", model, Cookie=cookie)[2] == b"weights"
    assert ask(page, "GET", model, Cookie="edgeqkv=guessed")[0] == 403
    assert ask(page, "GET", model)[0] == 403


def test_a_second_client_is_refused_and_the_first_may_reload(page):
    cookie = claim(page)
    assert ask(page, "POST", f"/{TOKEN}/claim", CLAIM)[0] == 409
    assert ask(page, "POST", f"/{TOKEN}/claim", CLAIM, Cookie="edgeqkv=other")[0] == 409
    status, headers, _ = ask(page, "POST", f"/{TOKEN}/claim", CLAIM, Cookie=f"a=b; {cookie}")
    assert status == 204
    assert headers["Set-Cookie"].startswith(cookie)


def test_posts_that_are_refused(page):
    cookie = claim(page)

    def post(name, body, **headers):
        return ask(page, "POST", f"/{TOKEN}/{name}", body, Cookie=cookie, **headers)

    assert post("other", {})[0] == 404
    assert post("result", b"{")[0] == 400
    assert post("result", b"\xff\xfe")[0] == 400
    assert post("result", b"[" * 100_000)[0] == 400
    assert post("result", b"null")[0] == 400
    assert post("result", RESULT, Content_Type="text/plain")[0] == 415
    assert post("result", b"", Content_Length="-1")[0] == 411
    assert post("result", b"0\r\n\r\n", Transfer_Encoding="chunked")[0] == 411
    assert post("result", b"{}", Content_Length=str(MAX_POST_BYTES["result"] + 1))[0] == 413
    assert post("claim", b" " * (MAX_POST_BYTES["claim"] + 1))[0] == 413
    assert ask(page, "PUT", f"/{TOKEN}/result", RESULT, Cookie=cookie)[0] == 501
    for change, words in (
        ({"id": "1"}, "result.id is '1'; it must be integer"),
        ({"more": 1}, "result has unknown key 'more'"),
        ({"samples": None}, "must have either an error or"),
        ({"error": "no"}, "must have either an error or"),
        ({"samples": {**RESULT["samples"], "warmup": [0.5]}}, "warmup[0] is 0.5"),
    ):
        status, _, body = post("result", RESULT | change)
        assert status == 400
        assert words in body.decode()
    assert ask(page, "POST", f"/{TOKEN}/claim", CLAIM | {"cpu_count": "8"})[0] == 400
    assert page.session.outcome is None


def test_a_job_goes_out_and_its_result_comes_back(page):
    cookie = claim(page)
    stream = listen(page, cookie)
    assert page.wait_for_claim(5).cpu_count == 8
    said = []
    runs = threading.Thread(target=lambda: said.append(page.run({"id": 1}, 10)))
    runs.start()
    assert next_event(stream) == ("job", {"id": 1})
    stream.close()
    stream = listen(page, cookie)  # the connection broke: it is told again
    assert next_event(stream) == ("job", {"id": 1})
    late = RESULT | {"id": 7}  # of a job given up long ago
    assert ask(page, "POST", f"/{TOKEN}/result", late, Cookie=cookie)[0] == 204
    assert ask(page, "POST", f"/{TOKEN}/result", RESULT, Cookie=cookie)[0] == 204
    runs.join(10)
    assert said[0].samples.repetitions == ((1, 2),)
    runs = threading.Thread(target=lambda: said.append(_error(lambda: page.run({"id": 2}, 10))))
    runs.start()
    assert next_event(stream) == ("job", {"id": 2})
    assert ask(page, "POST", f"/{TOKEN}/claim", CLAIM, Cookie=cookie)[0] == 204
    runs.join(10)
    assert isinstance(said[1], JobFailed)
    assert "the page was loaded again while it ran" in str(said[1])
    ends = threading.Thread(target=page.stop)
    ends.start()
    assert next_event(stream) == ("end", {})
    stream.close()
    ends.join(10)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", page.port), 2)


def _error(run):
    try:
        return run()
    except Exception as e:
        return e


def test_waiting_has_an_end(page, monkeypatch):
    monkeypatch.setattr(server, "GONE_S", 0.3)
    with pytest.raises(EdgeQKVError, match=r"no browser opened the link within 0\.2 s"):
        page.wait_for_claim(0.2)
    stream = listen(page, claim(page))
    page.wait_for_claim(5)
    with pytest.raises(JobFailed, match=r"hung: no result after 0\.3 s \(--timeout\)"):
        page.run({"id": 1}, 0.3)
    stream.close()
    start = time.monotonic()
    with pytest.raises(DeviceLost, match="the browser is gone"):
        page.run({"id": 2}, None)
    assert time.monotonic() - start < 6


def test_https_with_a_certificate_of_its_own(page, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    path = link.certificate(tmp_path, "127.0.0.1")
    secure = PageServer("127.0.0.1", page.session, path)
    trusting = ssl.create_default_context(cafile=path)
    idle = socket.create_connection(("127.0.0.1", secure.port))  # shakes no hands, holds up nobody
    connection = http.client.HTTPSConnection("127.0.0.1", secure.port, timeout=10, context=trusting)
    connection.request("GET", f"/{TOKEN}/")
    assert connection.getresponse().read() == b"<p>hello"
    der = connection.sock.getpeercert(binary_form=True)
    assert link.fingerprint(path).replace(":", "") == hashlib.sha256(der).hexdigest().upper()
    connection.close()
    idle.close()
    secure.stop()


@pytest.mark.parametrize(
    ("engine", "isolated", "asked", "run"),
    [
        ("wasm", True, None, [1, 4]),
        ("wasm", False, None, [1]),
        ("wasm", True, [2, 8], [2, 8]),
        ("webgpu", True, None, [1]),
        ("webgpu", True, [2, 8], [1]),
    ],
)
def test_thread_counts(engine, isolated, asked, run):
    """Eight processors: some are slow ones."""
    about = build(Claim, CLAIM | {"cross_origin_isolated": isolated}, "claim")
    assert threads_of(transport.Page(None, about, engine), asked) == run


def test_too_many_threads_for_the_device():
    page = transport.Page(None, build(Claim, CLAIM, "claim"), "wasm")
    assert threads_of(page, [32]) == [32]
    with pytest.raises(UsageError, match=r"-t is 33, .*browser has 8 CPUs; allowed: 1 to 32"):
        threads_of(page, [1, 33])
