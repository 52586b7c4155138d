"""Where a sweep runs: one module per transport, found by the first word of ``--device``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast

from device_bench.conditions import Conditions, Device
from edgeqkv.errors import EdgeQKVError, UsageError

# --device KIND or KIND:ARGUMENT -> the module whose ``open_devices`` makes the transports.
TRANSPORTS = {
    "local": "device_bench.devices.local",
    "adb": "device_bench.adb.transport",
    "browser": "device_bench.browser.transport",
    "qemu": "device_bench.devices.qemu",
}

OVERSUBSCRIBED = 4  # threads a CPU


class DeviceLost(EdgeQKVError):
    """The device cannot be reached any more; what was measured before is kept."""


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

        Passes: time, memory, depth, capacity; the last three only without ``no_memory``. And cold, on a
        transport whose attribute ``cold`` is true.

        Raises:
            JobFailed: no value came; the message is the reason, one line.
            DeviceLost: it has gone, and with it the rest of the sweep.
        """
        ...

    def close(self) -> None:
        """Also ends a job that runs in another thread."""


class TransportModule(Protocol):
    def open_devices(self, argument: str | None, engine: str | None) -> Sequence[Transport]:
        """The devices that ``argument``, the text after the colon, names.

        engine: as --engine says, None for the transport's own.

        Raises:
            UsageError: an argument or engine that this transport does not know.
            EdgeQKVError: the device cannot be reached; one line says what to do.
        """
        ...


def open_transports(
    names: Sequence[str], engine: str | None, cores: Sequence[int] = ()
) -> list[Transport]:
    """The devices of ``--device`` texts such as ``local``, ``adb``, ``adb:SERIAL``; none twice.

    cores: CPUs to run on, for transports with a method ``pin``; all where none is named.

    Raises:
        UsageError: an unknown transport, CPUs it cannot choose; and what ``open_devices`` raises.
    """
    opened: list[Transport] = []
    try:
        for name in dict.fromkeys(names):
            kind, colon, argument = name.partition(":")
            if kind not in TRANSPORTS or (colon and not argument):
                allowed = ", ".join(TRANSPORTS)
                raise UsageError(f"--device is {name!r}; allowed: {allowed}")
            module = cast(TransportModule, importlib.import_module(TRANSPORTS[kind]))
            for device in module.open_devices(argument or None, engine):
                opened.append(device)
                ids = [d.describe().id for d in opened]
                if ids[-1] and ids[-1] in ids[:-1]:  # adb and adb:SERIAL may name one phone
                    opened.pop().close()
        if cores:
            for device in opened:
                _pin(device, cores)
    except BaseException:
        for device in opened:
            device.close()
        raise
    return opened


def _pin(device: Transport, cores: Sequence[int]) -> None:
    pin = getattr(device, "pin", None)
    if pin is None:
        raise UsageError(f"--cores: a {device.describe().kind} device does not let CPUs be chosen")
    pin(tuple(cores))


def threads_of(device: Transport, asked: Sequence[int] | None) -> Sequence[int]:
    """Thread counts to run on ``device``: as asked, else 1; a transport with a method ``threads``
    chooses for itself. Raises UsageError as ``check_threads`` does."""
    choose = getattr(device, "threads", None)
    chosen: Sequence[int] = choose(asked) if choose is not None else asked or [1]
    machine = device.describe()
    check_threads(chosen, machine.kind, machine.cpu_count)
    return chosen


def check_threads(asked: Sequence[int], kind: str, cpus: int | None) -> None:
    """Raises UsageError for more than OVERSUBSCRIBED threads a CPU: runtimes spin, for minutes."""
    if cpus and (most := max(asked)) > OVERSUBSCRIBED * cpus:
        raise UsageError(
            f"-t is {most}, but --device {kind} has {cpus} CPUs; allowed: 1 to "
            f"{OVERSUBSCRIBED * cpus}"
        )


def run_each(devices: Sequence[Transport], work: Callable[[Transport], None]) -> list[DeviceLost]:
    """``work`` on every device: on this machine one after the other, then on all others at once.

    Returns what was lost on the way; a device that is lost does not end the work on others. All are
    closed at the end, and at once when the user interrupts.
    """
    lost: list[DeviceLost] = []

    def one(device: Transport) -> None:
        try:
            work(device)
        except DeviceLost as e:
            lost.append(e)

    here = [d for d in devices if d.describe().kind == "local"]
    others = [d for d in devices if d not in here]
    try:
        for device in here:
            one(device)
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            started = [pool.submit(one, device) for device in others]
            try:
                for future in started:
                    future.result()
            except BaseException:
                for device in others:
                    device.close()
                raise
    finally:
        for device in devices:
            device.close()
    return lost
