"""Converts dataclasses to plain data and back, checked against the types of their fields.

The types are str, int, float, bool, Literal, X | None, tuple, frozenset, list and dict of these, other such dataclasses,
TorchrunError, and Any for plain data, which travels as it is.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeAlias, Union

from ..errors import CLASSES, TorchrunError
from .cause import Cause, FailureText, failed

Plain: TypeAlias = dict[str, Any]
"""Data that JSON can hold."""
_PLAIN = frozenset({str, int, bool, type(None)})


def to_plain(value: Any) -> Any:
    """Return JSON-able data for a dataclass with fields of the types above, or for data.

    JSON has no word for NaN and infinity: they become None. Python writes them all the same, and then a browser can
    read nothing of the whole text.
    """
    cls = type(value)
    if cls in _PLAIN:  # most values
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, TorchrunError):
        if value._failure is None:
            return {"class": cls.__name__, "message": value.message, "cause": value.cause}
        return {"class": cls.__name__, "failure": to_plain(value._failure)}
    if isinstance(value, Cause):
        value = value.bounded()
    if is_dataclass(cls):
        return {name: to_plain(getattr(value, name)) for name in _fields(cls)[0]}
    if isinstance(value, dict):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple | frozenset | list):
        return [to_plain(each) for each in value]
    return value


def from_plain(cls: type[Any], data: Any, where: str) -> Any:
    """Return the instance of `cls` that was made plain; raise ValueError, which names the field, if it is none."""
    try:
        return _read(cls, data)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _read(hint: Any, value: Any) -> Any:
    """Return what plain data stands for, of a type; raise ValueError with the place in the data that does not fit."""
    if type(value) is hint and hint in (str, int, bool):  # most values; True does not count as int
        return value
    origin, inner = _parts(hint)
    if origin in (Union, types.UnionType):  # X | None; there is no other
        return None if value is None else _read(inner[0], value)
    if origin is tuple and inner[-1:] != (...,) and isinstance(value, list) and len(value) == len(inner):
        return tuple(_read(each, part) for each, part in zip(inner, value, strict=True))
    if origin in (tuple, frozenset, list) and isinstance(value, list):
        return origin(_read(inner[0], each) for each in value)
    if origin is dict and isinstance(value, Mapping):
        return {inner[0](name): _read(inner[1], each) for name, each in value.items()}
    if origin is Literal and value in inner:
        return value
    if hint is TorchrunError and isinstance(value, Mapping):
        cls = CLASSES.get(str(value.get("class")), TorchrunError)
        if "failure" in value:
            return failed(cls, _read(FailureText, value["failure"]))
        return cls(str(value.get("message", "")), value.get("cause"))
    if hint is Any:
        return value
    if origin is None and is_dataclass(hint):
        return _read_fields(hint, value)
    if hint is float and type(value) in (int, float):
        return float(value)
    raise ValueError(f" is {str(value)[:40]!r}, which does not fit")


@functools.cache  # the control node of a large gang reads thousands of messages at once
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what a type is made from, and of what: ``tuple`` and ``(int, ...)`` for ``tuple[int, ...]``."""
    return typing.get_origin(hint), typing.get_args(hint)


@functools.cache
def _fields(cls: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields by name, and the names of those without a default."""
    hints = typing.get_type_hints(cls)
    needed = (each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING)
    return {each.name: hints[each.name] for each in fields(cls)}, frozenset(needed)


def _read_fields(cls: Any, data: Any) -> Any:
    hints, needed = _fields(cls)
    if not isinstance(data, Mapping) or not needed <= data.keys() <= hints.keys():
        raise ValueError(f" is {str(data)[:80]!r}, which lacks the fields of {cls.__name__}, or has others")
    values, name = {}, ""
    try:
        for name, value in data.items():
            values[name] = _read(hints[name], value)
    except ValueError as error:
        raise ValueError(f".{name}{error}") from None
    return cls(**values)
