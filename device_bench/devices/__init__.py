"""Where a sweep runs: one module per transport, found by the first word of ``--device``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from device_bench.conditions import Conditions, Device
from edgeqkv.errors import UsageError

# --device KIND or KIND:ARGUMENT -> the module whose ``open_devices`` makes the transports.
TRANSPORTS = {
    "local": "device_bench.devices.local",
    "adb": "device_bench.adb.transport",
    "browser": "device_bench.browser.transport",
}


class Transport(Protocol):
    """One device, open.

    engine: what drives the runtime there: python, native or page.
    no_memory: why the memory of the process says nothing there; None where it can be read.
    """

    engine: str
    no_memory: str | None

    def describe(self) -> Device: ...

    def conditions(self, threads: int) -> Conditions:
        """The state of the device right now."""
        ...

    def run(self, job: Mapping[str, Any], timeout_s: float | None) -> Any:
        """The value that ``device_bench.worker.run`` computes for ``job``, computed there.

        Passes: time, memory, depth, capacity; the last three only without ``no_memory``.

        Raises:
            JobFailed: no value came; the message is the reason, one line.
        """
        ...

    def close(self) -> None: ...


class TransportModule(Protocol):
    def open_devices(self, argument: str | None, engine: str | None) -> Sequence[Transport]:
        """The devices that ``argument``, the text after the colon, names.

        engine: as --engine says, None for the transport's own.

        Raises:
            UsageError: an argument or engine that this transport does not know.
            EdgeQKVError: the device cannot be reached; one line says what to do.
        """
        ...


def open_transports(names: Sequence[str], engine: str | None) -> list[Transport]:
    """The devices of ``--device`` texts such as ``local``, ``adb``, ``adb:SERIAL``; none twice.

    Raises:
        UsageError: an unknown transport; and what ``open_devices`` raises.
    """
    opened: list[Transport] = []
    try:
        for name in dict.fromkeys(names):
            kind, colon, argument = name.partition(":")
            if kind not in TRANSPORTS or (colon and not argument):
                allowed = ", ".join(TRANSPORTS)
                raise UsageError(f"--device is {name!r}; allowed: {allowed}")
            module = cast(TransportModule, importlib.import_module(TRANSPORTS[kind]))
            opened += module.open_devices(argument or None, engine)
    except BaseException:
        for device in opened:
            device.close()
        raise
    return opened
