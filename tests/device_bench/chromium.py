"""A page in headless Chromium, driven by the DevTools protocol over two pipes: no other library."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """problems: errors and warnings of the console, exceptions. requests: every URL that was asked for."""

    def __init__(self, send):
        self._send, self.problems, self.requests = send, [], []

    def heard(self, method, params):
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str(params["args"]))
        if method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["text"])
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path: Path, *, width: int = 1000, height: int = 900, dark: bool = False):
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self._send("Page.navigate", url=path.resolve().as_uri())
        self.ask(
            "new Promise(r => document.readyState === 'complete' ? r(1) : addEventListener('load', r))"
        )

    def ask(self, script: str):
        """The value of a JavaScript expression."""
        flags = {"returnByValue": True, "awaitPromise": True}
        found = self._send("Runtime.evaluate", expression=script, **flags)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True, height: int | None = None):
        clip = {}
        if height:
            width = self.ask("innerWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        data = self._send("Page.captureScreenshot", captureBeyondViewport=whole, **clip)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def page():
    """A fresh browser with one empty page."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-pipe",
        ]
        flags += [f"--user-data-dir={profile}", "--disable-dev-shm-usage", "about:blank"]

        # The browser reads commands from descriptor 3 and answers on 4; dup2 by way of high numbers,
        # for 3 and 4 may be the pipes themselves.
        shell = (
            f'exec 90<&{theirs_in} 91>&{theirs_out}; exec 3<&90 4>&91 90<&- 91>&-; exec "$0" "$@"'
        )
        process = subprocess.Popen(
            ["bash", "-c", shell, find() or "chromium", *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        stuck = threading.Timer(120, process.kill)  # the read below then ends
        stuck.start()
        try:
            with (
                os.fdopen(ours_in, "rb", buffering=0) as answers,
                os.fdopen(ours_out, "wb", 0) as commands,
            ):
                yield _connect(answers, commands)
        finally:
            stuck.cancel()
            process.kill()
            process.wait()


def _connect(answers, commands) -> Page:
    state = {"id": 0, "session": None, "rest": b""}

    def message():
        while b"\0" not in state["rest"]:
            piece = answers.read(1 << 16)
            assert piece, "chromium ended, or did not answer in time"
            state["rest"] += piece
        line, state["rest"] = state["rest"].split(b"\0", 1)
        return json.loads(line)

    def send(method, **params):
        state["id"] += 1
        session = {"sessionId": state["session"]} if state["session"] else {}
        command = {"id": state["id"], "method": method, "params": params, **session}
        commands.write(json.dumps(command).encode() + b"\0")
        while (answer := message()).get("id") != state["id"]:
            if "method" in answer:
                found.heard(answer["method"], answer["params"])
        assert "error" not in answer, answer
        return answer["result"]

    found = Page(send)
    targets = send("Target.getTargets")["targetInfos"]
    target = next(t["targetId"] for t in targets if t["type"] == "page")
    state["session"] = send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    return found
