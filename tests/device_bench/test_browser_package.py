"""onnxruntime-web comes from npm, pinned; the page's own files come with edgeqkv."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest

from device_bench.browser import package, transport
from edgeqkv.errors import MissingDependencyError

npm = pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")


class Registry(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@npm
def test_a_package_that_is_not_the_pinned_one_is_refused(tmp_path, monkeypatch):
    """The registry serves something else under the right name."""
    import tarfile

    (name, *_) = package.SHA256
    (tmp_path / name).write_text("evil()")
    root = tmp_path / "registry"
    root.mkdir()
    with tarfile.open(root / "evil.tgz", "w:gz") as tar:
        tar.add(tmp_path / name, f"package/dist/{name}")
        tar.add(tmp_path / name, "package/dist/../../../../outside.mjs")
    handler = functools.partial(Registry, directory=str(root))
    registry = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    url = f"http://127.0.0.1:{registry.server_port}"
    version = {
        "name": "onnxruntime-web",
        "version": package.VERSION,
        "dist": {
            "tarball": f"{url}/evil.tgz",
            "shasum": hashlib.sha1((root / "evil.tgz").read_bytes()).hexdigest(),
        },
    }
    listing = {"name": "onnxruntime-web", "versions": {package.VERSION: version}}
    (root / "onnxruntime-web").write_text(json.dumps(listing))
    monkeypatch.setenv("EDGEQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NPM_CONFIG_CACHE", str(tmp_path / "npm"))
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", url)
    threading.Thread(target=registry.serve_forever, daemon=True).start()
    try:
        with pytest.raises(MissingDependencyError, match="its sha256 differs"):
            package.runtime_files()
    finally:
        registry.shutdown()
        registry.server_close()
    assert not (tmp_path / "outside.mjs").exists()
    assert not (tmp_path / "cache/outside.mjs").exists()


@npm
def test_no_network_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NPM_CONFIG_CACHE", str(tmp_path / "npm"))
    monkeypatch.setenv("NPM_CONFIG_FETCH_RETRIES", "0")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9")
    with pytest.raises(MissingDependencyError, match=r"cannot be fetched from .*connect to the"):
        package.runtime_files()
    assert not list((tmp_path / "cache").glob("*/*"))


def test_no_npm_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"cannot be fetched from .*install npm"):
        package.runtime_files()


def test_every_file_of_the_page_is_in_the_package():
    """What pyproject.toml ships is what the page asks for."""
    root = Path(transport.PAGE)
    html = (root / "index.html").read_text()
    assert all((root / name).is_file() for name in ("page.js", "style.css", "worker.js"))
    assert "http" not in html.replace("http-equiv", "")
