"""How a phone reaches the page: an address, a certificate, ``adb reverse``, a QR code."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import subprocess
import sys
from pathlib import Path

from device_bench.adb.client import find_adb, listed
from edgeqkv.console import note
from edgeqkv.errors import EdgeQKVError, MissingDependencyError

CERTIFICATE_DAYS = 2
ADB_S = 20


def lan_address() -> str:
    """The address of this machine in its network; asks the routing table, sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def certificate(folder: Path, address: str) -> Path:
    """A self-signed certificate for ``address`` and its key in one file, valid for two days.

    Raises:
        MissingDependencyError: there is no openssl, or one too old for -addext.
    """
    path = folder / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
    ]
    command += ["-nodes", "-days", str(CERTIFICATE_DAYS), "-subj", "/CN=edgeqkv bench"]
    command += ["-addext", f"subjectAltName=IP:{address}", "-keyout", str(path), "-out", "-"]
    try:
        made = subprocess.run(command, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        raise MissingDependencyError(
            "--device browser:https needs the openssl command (1.1.1 or newer) for its certificate; "
            "install it, or use --device browser:adb or browser"
        ) from None
    with path.open("ab") as f:
        f.write(made.stdout)
    return path


def fingerprint(certificate: Path) -> str:
    """SHA-256 of a certificate, as browsers show it."""
    pem = certificate.read_text("ascii")
    der = ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE-----") :])
    return hashlib.sha256(der).digest().hex(":").upper()


def attached_phone(serial: str | None = None) -> str | None:
    """The serial of the phone asked for, or of the only one; None where none can be used."""
    try:
        ready = [d.serial for d in listed() if d.state == "device"]
    except (EdgeQKVError, OSError, subprocess.SubprocessError):
        return None
    chosen = [s for s in ready if serial in (None, s)]
    return chosen[0] if len(chosen) == 1 else None


def reverse(serial: str, port: int) -> int:
    """Make ``port`` of this machine a port of localhost on the phone, by cable: a secure context.

    Returns the phone's port, which its adbd chose.
    """
    chosen = _adb(serial, "reverse", "tcp:0", f"tcp:{port}").strip()
    if not chosen.isdigit():
        raise EdgeQKVError(f"{serial}: adb reverse names no port but {chosen[:60]!r}")
    return int(chosen)


def unreverse(serial: str, port: int) -> None:
    """Undo :func:`reverse`; a phone that was unplugged has forgotten it already."""
    with contextlib.suppress(EdgeQKVError):
        _adb(serial, "reverse", "--remove", f"tcp:{port}")


def open_on(serial: str, url: str) -> None:
    """Ask the phone to show ``url`` in its browser. A token and a number need no quotes."""
    _adb(serial, "shell", "am", "start", "-a", "android.intent.action.VIEW", "-d", url)


def _adb(serial: str, *arguments: str) -> str:
    command = [find_adb(), "-s", serial, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ADB_S
        )
    except subprocess.TimeoutExpired:
        raise EdgeQKVError(f"{serial} does not answer after {ADB_S} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise EdgeQKVError(f"{serial}: adb {arguments[0]}: {said}")
    return done.stdout


def show_link(url: str) -> None:
    """The link, and as a QR code where segno is installed, on stderr."""
    note(f"open on the phone: {url}")
    try:
        import segno
    except ImportError:
        note("(pip install 'edgeqkv[browser]' shows it as a QR code too)")
        return
    if sys.stderr.isatty():
        segno.make(url, error="l").terminal(out=sys.stderr, compact=True)
