"""What ``--device browser`` opens: the link, and whom it believes a browser to be."""

from __future__ import annotations

import io

import pytest

from device_bench.browser import link, transport
from device_bench.browser.facts import system_of
from device_bench.devices import open_transports
from edgeqkv.errors import EdgeQKVError, MissingDependencyError, UsageError


@pytest.mark.parametrize(
    ("name", "engine", "words"),
    [
        ("browser:wifi", None, "allowed: browser, browser:lan, browser:adb"),
        ("browser:lan:x", None, "allowed: browser"),
        ("browser", "python", "--engine is 'python'; allowed with --device browser: wasm, webgpu"),
    ],
)
def test_misuse(name, engine, words):
    with pytest.raises(UsageError, match=words):
        open_transports([name], engine)


def test_the_link_is_a_qr_code_on_a_terminal(monkeypatch):
    pytest.importorskip("segno")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        link.show_link("http://192.0.2.1:1234/token/")
        lines = stream.getvalue().splitlines()
        assert lines[0] == "open on the phone: http://192.0.2.1:1234/token/"
        assert any("\N{UPPER HALF BLOCK}" in line for line in lines) == shown
        assert all(len(line) <= 80 for line in lines)


def test_without_openssl_https_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="needs the openssl command"):
        link.certificate(tmp_path, "127.0.0.1")


def test_no_phone_for_adb(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "runtime_files", dict)
    monkeypatch.delenv("ADB", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EdgeQKVError, match="browser:adb: PIXEL is not attached and authorised"):
        open_transports(["browser:adb:PIXEL"], None)


@pytest.mark.parametrize(
    ("agent", "system"),
    [
        ("Mozilla/5.0 (iPhone; CPU iPhone OS 26_0 like Mac OS X) Version/26.0 Safari", "iPhone"),
        ("Mozilla/5.0 (Linux; Android 10; K) Chrome/156.0", "Android"),
        ("Mozilla/5.0 (X11; Linux x86_64) Chrome/156.0", "Linux"),
        ("curl", "unknown"),
    ],
)
def test_system_of_a_user_agent(agent, system):
    assert system_of(agent) == system
