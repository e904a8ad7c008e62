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
_PLAIN = frozenset({str, int, float, bool, type(None)})


def to_plain(value: Any) -> Any:
    """Return JSON-able data for a dataclass with fields of the types above."""
    cls = type(value)
    if cls is float:
        return value if math.isfinite(value) else None
    if cls in _PLAIN:  # most values
        return value
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


def finite(data: Any) -> Any:
    """Return plain data with None for what JSON has no word for: NaN and infinity.

    Python writes them all the same, and then a browser can read nothing of the whole text.
    """
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(finite, data))
    return data


def from_plain(cls: type[Any], data: Any, where: str) -> Any:
    """Return the instance of `cls` that was made plain; raise ValueError, which names the field, if it is none."""
    try:
        return _read(cls, data)
    except _Misfit as error:
        raise ValueError(f"{where}{error}") from None


class _Misfit(Exception):
    """The place in the data that does not fit its type, and why."""


def _read(hint: Any, value: Any) -> Any:
    """Return what plain data stands for, of a type; raise `_Misfit` where it does not fit."""
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
        return {_key(name, inner[0]): _read(inner[1], each) for name, each in value.items()}
    if origin is Literal and value in inner:
        return value
    if hint is TorchrunError and isinstance(value, Mapping):
        return _read_error(value)
    if hint is Any:
        return value
    if origin is None and is_dataclass(hint):
        return _read_fields(hint, value)
    if hint is float and type(value) in (int, float) and _is_finite(value):
        return float(value)
    raise _Misfit(f" is {str(value)[:40]!r}, which does not fit")


@functools.cache  # the control node of a large gang reads thousands of messages at once
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what a type is made from, and of what: ``tuple`` and ``(int, ...)`` for ``tuple[int, ...]``."""
    return typing.get_origin(hint), typing.get_args(hint)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int of hundreds of digits
        return False


def _read_error(value: Mapping[str, Any]) -> TorchrunError:
    cls = CLASSES.get(str(value.get("class")), TorchrunError)
    if "failure" in value:
        return failed(cls, _read(FailureText, value["failure"]))
    return cls(str(value.get("message", "")), value.get("cause"))


def _key(name: str, cls: type[Any]) -> Any:
    """Return a key as the type that the field's keys have; plain data has text only."""
    try:
        return cls(name)
    except ValueError:
        raise _Misfit(f" has the key {name[:40]!r}, which does not fit") from None


@functools.cache
def _fields(cls: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields by name, and the names of those without a default."""
    hints = typing.get_type_hints(cls)
    needed = (each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING)
    return {each.name: hints[each.name] for each in fields(cls)}, frozenset(needed)


def _read_fields(cls: Any, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise _Misfit(f" is {str(data)[:40]!r}, not an object with fields")
    hints, needed = _fields(cls)
    if not needed <= data.keys() <= hints.keys():
        missing = [name for name in hints if name in needed and name not in data]
        unknown = [str(name)[:40] for name in data if name not in hints]
        raise _Misfit(f" lacks the fields {missing}, or has unknown fields: {unknown}")
    values, name = {}, ""
    try:
        for name, value in data.items():
            values[name] = _read(hints[name], value)
    except _Misfit as error:
        raise _Misfit(f".{name}{error}") from None
    return cls(**values)
