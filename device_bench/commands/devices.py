"""``edgeqkv devices``: what can be measured on, and in what state it is."""

from __future__ import annotations

from typing import Annotated

import typer


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
        names = ("device", "model", "SoC", "ABI", "Android", "RAM", "free", "battery", "C")
        rows = [
            [
                f"adb:{p.serial}" + (" (emulated)" if p.emulated else ""),
                p.model,
                p.soc,
                p.abi,
                p.android,
                human_bytes(p.memory_bytes) if p.memory_bytes else None,
                human_bytes(p.free_bytes) if p.free_bytes else None,
                None if p.battery_percent is None else f"{p.battery_percent} %",
                p.temperature_c,
                p.thermal_status,
                p.page_size,
            ]
            for p in phones
        ]
        print_table((*names, "thermal", "page"), rows, gap=1)
    for serial, state, text in others:
        note(f"{serial} is {state}: {text}")
    if not phones and not others:
        note(
            "adb sees no device; connect a phone with USB debugging on. --device local is always there"
        )
