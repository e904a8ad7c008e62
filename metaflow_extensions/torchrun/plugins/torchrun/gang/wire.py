"""How a dataclass becomes plain data, and back: its fields' types say what fits.

The types are str, int, float, bool, X | None, tuple, frozenset and dict of these, other such dataclasses,
TorchrunError, and Any for plain data, which travels as it is.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union

from ..errors import CLASSES, TorchrunError
from .cause import Cause, FailureText, failed

_PLAIN = frozenset({str, int, float, bool, type(None)})


def to_plain(value: Any) -> Any:
    """Return JSON-able data for a dataclass with fields of the types above."""
    cls = type(value)
    if cls is float:
        return value if math.isfinite(value) else None
    if cls in _PLAIN:  # most are
        return value
    if isinstance(value, TorchrunError):
        if value._failure is None:
            return {"class": cls.__name__, "message": value.message, "cause": value.cause}
        return {"class": cls.__name__, "failure": to_plain(value._failure)}
    if isinstance(value, Cause):
        value = value.bounded()
    names = _names(typing.cast("Hashable", cls))
    if names is not None:
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple | frozenset):
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


@functools.cache
def _names(cls: Any) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None of another class."""
    return tuple(each.name for each in fields(cls)) if is_dataclass(cls) else None


def from_plain(cls: type[Any], data: Any, where: str) -> Any:
    """Return the instance of `cls` that was made plain; raise ValueError, which names the field, if it is none."""
    try:
        return _reader(typing.cast("Hashable", cls))(data)
    except _Misfit as error:
        raise ValueError(f"{where}{error}") from None


class _Misfit(Exception):
    """Where in the data something does not fit, and what."""


def _misfit(value: Any) -> _Misfit:
    return _Misfit(f" is {str(value)[:40]!r}, which does not fit")


Reader = Callable[[Any], Any]
"""Takes plain data and returns what it stands for, or raises `_Misfit`."""


@functools.cache
def _reader(hint: Any) -> Reader:
    """Return what reads values of a type. It is made once: the control node of a large gang reads thousands at once."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):  # X | None; there is no other
        read = _reader(inner[0])
        return lambda value: None if value is None else read(value)
    if origin in (tuple, frozenset):
        return _reader_of_many(origin, _reader(inner[0]))
    if origin is dict:
        return _reader_of_dict(inner[0], _reader(inner[1]))
    if hint is TorchrunError:
        return _read_error
    if hint is Any:
        return lambda value: value
    if is_dataclass(hint):
        return _reader_of_fields(hint)
    if hint is float:
        return _read_float
    assert hint in (str, int, bool), f"{hint} can't travel"
    return _reader_of_plain(hint)


def _reader_of_plain(hint: type[Any]) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not hint:
            raise _misfit(value)
        return value

    return read


def _read_float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _misfit(value)
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        raise _misfit(value) from None
    if not math.isfinite(number):
        raise _misfit(value)
    return number


def _read_error(value: Any) -> TorchrunError:
    if not isinstance(value, Mapping):
        raise _misfit(value)
    cls = CLASSES.get(str(value.get("class")), TorchrunError)
    if "failure" in value:
        return failed(cls, _reader(typing.cast("Hashable", FailureText))(value["failure"]))
    return cls(str(value.get("message", "")), value.get("cause"))


def _reader_of_many(collection: type[Any], read_one: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _misfit(value)
        return collection(map(read_one, value))

    return read


def _reader_of_dict(key: type[Any], read_one: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _misfit(value)
        return {_key(name, key): read_one(each) for name, each in value.items()}

    return read


def _key(name: str, cls: type[Any]) -> Any:
    """Return a key as the type that the field's keys have; plain data has text only."""
    try:
        return cls(name)
    except ValueError:
        raise _Misfit(f" has the key {name[:40]!r}, which does not fit") from None


def _reader_of_fields(cls: Any) -> Reader:
    hints = typing.get_type_hints(cls)
    readers = {each.name: _reader(hints[each.name]) for each in fields(cls)}
    needed = {each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING}

    def read(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise _Misfit(f" is {str(data)[:40]!r}, not an object with fields")
        if not needed <= data.keys() <= readers.keys():
            missing = [name for name in readers if name in needed and name not in data]
            unknown = [str(name)[:40] for name in data if name not in readers]
            raise _Misfit(f" lacks the fields {missing}, or has fields that nobody knows: {unknown}")
        values, name = {}, ""
        try:
            for name, value in data.items():
                values[name] = readers[name](value)
        except _Misfit as error:
            raise _Misfit(f".{name}{error}") from None
        return cls(**values)

    return read
