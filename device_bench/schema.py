"""Frozen dataclasses from JSON by their type hints, and the JSON Schema those hints mean.

One definition for both: what :func:`build` refuses is what the published schema refuses.
Understood: int, float, str, bool, None, Any, ``X | None``, ``tuple[X, ...]``, ``tuple[X, Y]``,
``Mapping[str, X]`` and dataclasses of these.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from edgeqkv.errors import SpecError
from edgeqkv.spec import check_keys

_PLAIN: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    str: (str,),
    bool: (bool,),
    type(None): (type(None),),
}
_JSON_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def build(tp: Any, data: Any, where: str) -> Any:
    """``data`` (parsed JSON) as a ``tp``.

    Raises:
        SpecError: a key is unknown or missing, or a value has the wrong type; ``where`` names it.
    """
    if tp is Any:
        return data
    if tp in _PLAIN:
        good = isinstance(data, _PLAIN[tp]) and (tp is bool or not isinstance(data, bool))
        return data if good else _wrong(where, data, _JSON_NAMES[tp])
    if dataclasses.is_dataclass(tp):
        return _build_dataclass(tp, data, where)
    origin, arguments = typing.get_origin(tp), typing.get_args(tp)
    if origin in (types.UnionType, typing.Union):
        (only,) = (a for a in arguments if a is not type(None))
        return None if data is None else build(only, data, where)
    if origin is tuple:
        if not isinstance(data, list):
            return _wrong(where, data, "array")
        if arguments[-1] is Ellipsis:
            return tuple(build(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(data))
        if len(data) != len(arguments):
            return _wrong(where, data, f"array of {len(arguments)}")
        pairs = enumerate(zip(arguments, data, strict=True))
        return tuple(build(a, v, f"{where}[{i}]") for i, (a, v) in pairs)
    assert origin is Mapping, tp
    if not isinstance(data, dict):
        return _wrong(where, data, "object")
    return {key: build(arguments[1], value, f"{where}.{key}") for key, value in data.items()}


def _build_dataclass(tp: Any, data: Any, where: str) -> Any:
    hints, fields = typing.get_type_hints(tp), dataclasses.fields(tp)
    allowed = frozenset(f.name for f in fields)
    check_keys(where, data, allowed, frozenset(f.name for f in fields if _is_required(f)))
    return tp(**{k: build(hints[k], v, f"{where}.{k}") for k, v in data.items()})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _wrong(where: str, data: Any, expected: str) -> Any:
    found = "array" if isinstance(data, list) else "object" if isinstance(data, dict) else None
    found = found or repr(data)[:40]
    raise SpecError(f"{where} is {found}; it must be {expected}")


def json_schema(tp: Any) -> dict[str, Any]:
    """The JSON Schema (2020-12) of what :func:`build` accepts; docstrings become descriptions."""
    if tp is Any:
        return {}
    if tp in _PLAIN:
        return {"type": _JSON_NAMES[tp]}
    if dataclasses.is_dataclass(tp):
        hints, fields = typing.get_type_hints(tp), dataclasses.fields(tp)
        return {
            "type": "object",
            "description": " ".join((tp.__doc__ or "").split()),
            "properties": {f.name: json_schema(hints[f.name]) for f in fields},
            "required": [f.name for f in fields if _is_required(f)],
            "additionalProperties": False,
        }
    origin, arguments = typing.get_origin(tp), typing.get_args(tp)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [json_schema(a) for a in arguments]}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": json_schema(arguments[0])}
    if origin is tuple:
        items = [json_schema(a) for a in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    assert origin is Mapping, tp
    return {"type": "object", "additionalProperties": json_schema(arguments[1])}
