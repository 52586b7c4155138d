"""``edgeqkv devices``: what can be measured on, and in what state it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from device_bench.adb.phone import Phone


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List the phones that adb sees. What a phone does not tell is ``-`` (null in JSON).

    Example: edgeqkv devices
    """
    import dataclasses

    from device_bench.adb.client import Adb, listed, what_to_do
    from device_bench.adb.phone import read_phone
    from device_bench.devices import DeviceLost
    from edgeqkv.console import human_bytes, note, print_json, print_table

    phones, others = [], []
    for found in listed():
        try:
            if found.state == "device":
                phones.append(read_phone(Adb(found.serial)))
            else:
                others.append((found.serial, found.state, what_to_do(found.state)))
        except DeviceLost as e:
            others.append((found.serial, "lost", str(e)))
    if as_json:
        usable = [{"state": "device", **dataclasses.asdict(p)} for p in phones]
        unusable = [{"serial": s, "state": state, "advice": text} for s, state, text in others]
        print_json([*usable, *unusable])
        return
    if phones:
        facts: dict[str, Callable[[Phone], object]] = {
            "model": lambda p: p.model,
            "SoC": lambda p: p.soc,
            "ABI": lambda p: p.abi,
            "Android": lambda p: p.android,
            "RAM": lambda p: p.memory_bytes and human_bytes(p.memory_bytes),
            "storage free": lambda p: p.free_bytes and human_bytes(p.free_bytes),
            "battery": lambda p: None if p.battery_percent is None else f"{p.battery_percent} %",
            "temperature": lambda p: None if p.temperature_c is None else f"{p.temperature_c} C",
            "throttled": lambda p: p.thermal_status,
            "page size": lambda p: p.page_size and human_bytes(p.page_size),
            "emulated": lambda p: "yes: correctness only" if p.emulated else "no",
        }
        rows = [[name, *(read(p) for p in phones)] for name, read in facts.items()]
        print_table(("--device", *(f"adb:{p.serial}" for p in phones)), rows)
    for serial, state, text in others:
        note(f"{serial} is {state}: {text}")
    if not phones and not others:
        note(
            "adb sees no device; connect a phone with USB debugging on. --device local is always there"
        )
