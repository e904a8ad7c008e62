"""Rewrites classes so that Metaflow's generator of type stubs (2.19) shows all of their types.

The generator shows methods and properties, but no annotated attributes. It shows ``Generic[T]`` as ``Generic``, and
``dict[int, int]`` as ``dict``. Classes are changed in the generator's own process, when it looks at their
module. Where it shows all that by itself one day, this module can go.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, Generic

_NAMED = ".outputs"  # what has the classes that annotations name for type checkers alone


class ForStubs:
    """Goes into a module as `_addl_stubgen_modules`; the generator iterates over it before it writes the module's stub.

    Those are names of further modules: of the one that the annotations name, and nothing else imports so early.
    """

    def __init__(self, *classes: type) -> None:
        self._classes = classes

    def __iter__(self) -> Iterator[str]:
        for cls in self._classes:
            with suppress(Exception):  # then its stub has less
                _show_attributes(cls)
                _show_parameters(cls)
        return iter([f"{__package__}{_NAMED}"])


def _show_attributes(cls: type) -> None:
    """Make properties of the attributes that a class annotates, and spell the types of its properties in full."""
    # Ours are annotated with one class that importing `metaflow` does not import.
    known = vars(import_module(_NAMED, __package__))
    hints = typing.get_type_hints(cls, localns=known)
    properties = {name: each.fget for name, each in vars(cls).items() if isinstance(each, property)}
    hints |= {name: typing.get_type_hints(get, localns=known)["return"] for name, get in properties.items()}
    for name, annotation in hints.items():
        if not name.startswith("_"):
            setattr(cls, name, _property(_spelled(annotation)))


def _property(annotation: Any) -> property:
    def get(self: object) -> Any: ...

    get.__annotations__["return"] = annotation
    return property(get)


def _spelled(annotation: Any) -> Any:
    """Return a type in the old spelling, as in ``typing.Dict[int, int]``, of which the generator shows all."""
    origin, args = typing.get_origin(annotation), tuple(map(_spelled, typing.get_args(annotation)))
    if not args:
        return annotation
    if origin in (types.UnionType, typing.Union):
        return typing.Union[args]  # noqa: UP007 - made of a tuple
    assert origin is not None
    return getattr(typing, origin.__name__.capitalize())[args]


def _show_parameters(cls: type) -> None:
    """Have a generic class inherit from one whose name is that of ``Generic`` with its parameters."""
    if Generic not in cls.__bases__:
        return
    generic: Any = Generic
    parameters = getattr(cls, "__parameters__", ())
    name = f"Generic[{', '.join(each.__name__ for each in parameters)}]"
    base = types.new_class(
        name, (generic[parameters],), {}, lambda body: body.update(__module__="typing", __slots__=())
    )
    cls.__bases__ = tuple(base if each is Generic else each for each in cls.__bases__)
