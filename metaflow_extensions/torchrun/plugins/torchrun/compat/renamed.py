"""Fallbacks for private names of Metaflow that are missing or have changed.

A convenience, which no flow needs, is left out, and one line says so. A missing name that a gang needs is an error
with the name and Metaflow's version. ``tests/unit/test_renamed.py`` takes each name away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from ..errors import TorchrunError

_KNOWN = "2.13 to 2.19"  # versions of Metaflow whose sources were read
REMEDY = "Install a newer metaflow-torchrun, or an older Metaflow."
_REQUIRED = object()
_said: set[str] = set()  # the printed lines of this process; threads may add to it


@contextmanager
def harmless(tell: Callable[[Exception], None] = lambda error: None) -> Iterator[None]:
    """Catch every exception and pass it to `tell`, except our own errors and that of Metaflow's ``@timeout``.

    Signal handlers raise these in the main thread, in the middle of any code. If this caught one, the node would miss
    the end of the gang, and the gang would wait for the node.
    """
    try:
        yield
    except (TorchrunError, TimeoutException):
        raise
    except Exception as error:
        tell(error)


@contextmanager
def convenience(what: str) -> Iterator[None]:
    """Leave `what` out if it fails, and print one line about it, once in a process.

    The failure neither ends a flow nor hides the error that ends it; see `harmless`.
    """

    def tell(error: Exception) -> None:
        if what not in _said:
            _said.add(what)
            _tell(f"[torchrun] Left out: {what}. {versions()} ({type(error).__name__}: {error}).")

    with harmless(tell):
        yield


def known(module: str, name: str, instead: Any = _REQUIRED) -> Any:
    """Return `name` of Metaflow's `module`; if it is missing, return `instead` or else raise `TorchrunError`."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        if instead is not _REQUIRED:
            return instead
        raise TorchrunError(
            f"@torchrun needs {module}.{name} of Metaflow, which is not there. {versions()}. {REMEDY}"
        ) from error


# The exception of Metaflow's ``@timeout`` (``plugins/timeout_decorator.py``, 2.19); if missing, only ours pass.
TimeoutException: Any = known("metaflow.plugins.timeout_decorator", "TimeoutException", TorchrunError)


def need(thing: Any, name: str) -> Any:
    """Return the attribute `name` of an object of Metaflow; raise `TorchrunError` if it is missing."""
    try:
        return getattr(thing, name)
    except AttributeError as error:
        owner = (thing if isinstance(thing, type) else type(thing)).__name__
        raise TorchrunError(
            f"@torchrun needs {owner}.{name} of Metaflow, which is not there. {versions()}. {REMEDY}"
        ) from error


def versions() -> str:
    """Return a sentence with the versions of Metaflow that this code knows, and the one that runs."""
    # Metaflow itself may still be importing.
    here = getattr(sys.modules.get("metaflow"), "__version__", "another version")
    return f"This version of metaflow-torchrun knows Metaflow {_KNOWN}, and this is {here}"


def _tell(line: str) -> None:
    with suppress(OSError, ValueError):  # the terminal is gone, or stderr is closed
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
