"""How a dataclass becomes plain data, and back: its fields' types say what fits.

The types are str, int, float, bool, X | None, tuple, frozenset and dict of these, other such dataclasses, and
TorchrunError.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union

from ..errors import CLASSES, TorchrunError
from .cause import Cause


def to_plain(value: Any) -> Any:
    """Return JSON-able data for a dataclass with fields of the types above."""
    if isinstance(value, TorchrunError):
        return {"class": type(value).__name__, "message": value.message, "cause": value.cause}
    if isinstance(value, Cause):
        value = value.bounded()
    if is_dataclass(value):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple | frozenset):
        return [to_plain(each) for each in value]
    return value


def from_plain(cls: type[Any], data: Any, where: str) -> Any:
    """Return the instance of `cls` that was made plain; raise ValueError, which names the field, if it is none."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is {str(data)[:40]!r}, not an object with fields")
    hints = _hints(typing.cast("Hashable", cls))
    missing = [name for name, (_, is_needed) in hints.items() if is_needed and name not in data]
    unknown = [str(name)[:40] for name in data if name not in hints]
    if missing or unknown:
        raise ValueError(f"{where} lacks the fields {missing}, or has fields that nobody knows: {unknown}")
    return cls(**{name: _value(value, hints[name][0], f"{where}.{name}") for name, value in data.items()})


@functools.cache
def _hints(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return the fields of a dataclass with their types, and whether they must be given."""
    hints = typing.get_type_hints(cls)
    optional = {each.name for each in fields(cls) if each.default is not MISSING or each.default_factory is not MISSING}
    return {each.name: (hints[each.name], each.name not in optional) for each in fields(cls)}


def _value(value: Any, hint: Any, where: str) -> Any:
    """Return `value` as the type that a field has."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):  # X | None; there is no other
        return None if value is None else _value(value, inner[0], where)
    if origin in (tuple, frozenset) and isinstance(value, list):
        return origin(_value(each, inner[0], where) for each in value)
    if origin is dict and isinstance(value, Mapping):
        return {_key(key, inner[0], where): _value(each, inner[1], where) for key, each in value.items()}
    if hint is TorchrunError and isinstance(value, Mapping):
        cls = CLASSES.get(str(value.get("class")), TorchrunError)
        return cls(str(value.get("message", "")), value.get("cause"))
    if is_dataclass(hint):
        return from_plain(typing.cast("type[Any]", hint), value, where)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where} is {str(value)[:40]!r}, which does not fit")
    return value


def _key(key: str, hint: Any, where: str) -> Any:
    """Return a key as the type that the field's keys have; plain data has text only."""
    try:
        return hint(key)
    except ValueError:
        raise ValueError(f"{where} has the key {key[:40]!r}, which does not fit") from None
