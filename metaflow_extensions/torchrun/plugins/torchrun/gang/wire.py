"""Converts dataclasses to plain data and back.

The types of their fields are str, int, float, bool, Literal, X | None, tuple, frozenset, list and dict of these, other such
dataclasses, TorchrunError, and Any for plain data, which travels as it is. Both sides run the same code, so a plain value
is not checked; a dataclass has the fields that it should have.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from dataclasses import is_dataclass
from typing import Any, TypeAlias, Union

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
        return {name: to_plain(getattr(value, name)) for name in _fields(cls)}
    if isinstance(value, dict):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple | frozenset | list):
        return [to_plain(each) for each in value]
    return value


def from_plain(cls: type[Any], data: Any, where: str) -> Any:
    """Return the instance of `cls` that was made plain; raise ValueError, which names it, if it is none."""
    try:
        return _read(cls, data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} does not fit: {type(error).__name__}: {error}") from error


def _read(hint: Any, value: Any) -> Any:
    """Return what plain data stands for, of a type; raise an error of Python's where it can't be that."""
    if value is None or hint in _PLAIN:  # most values
        return value
    origin, inner = _parts(hint)
    if origin in (Union, types.UnionType):  # X | None; there is no other
        return _read(inner[0], value)
    if origin is tuple and inner[-1] is not ...:
        return tuple(_read(each, part) for each, part in zip(inner, value, strict=True))
    if origin in (tuple, frozenset, list):
        return origin(_read(inner[0], each) for each in value)
    if origin is dict:
        return {inner[0](name): _read(inner[1], each) for name, each in value.items()}
    if hint is TorchrunError:
        kind = CLASSES[value["class"]]
        if "failure" in value:
            return failed(kind, _read(FailureText, value["failure"]))
        return kind(value["message"], value["cause"])
    if origin is None and is_dataclass(hint):
        cls: Any = hint
        hints = _fields(cls)
        return cls(**{name: _read(hints[name], each) for name, each in value.items()})
    return value


@functools.cache  # the control node of a large gang reads thousands of messages at once
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what a type is made from, and of what: ``tuple`` and ``(int, ...)`` for ``tuple[int, ...]``."""
    return typing.get_origin(hint), typing.get_args(hint)


_fields = functools.cache(typing.get_type_hints)
"""Returns the types of a dataclass's fields by name."""
