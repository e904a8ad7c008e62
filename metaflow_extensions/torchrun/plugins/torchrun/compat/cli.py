"""Private names of Metaflow's command line: how it prints errors, and how commands are made.

Read in ``metaflow/cli.py``, ``exception.py`` and ``runtime.py`` of 2.13 and 2.19.39.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from ..errors import TorchrunError
from .renamed import convenience, known

click: Any = None  # without it the extension registers no commands
with suppress(ImportError):
    click = import_module("metaflow._vendor.click")
MetaflowException: type = known("metaflow.exception", "MetaflowException", TorchrunError)
# Metaflow loads our commands for every flow, also for one without a step of ours. That must not fail.
CommandException: Any = known("metaflow.exception", "CommandException", TorchrunError)


def print_errors_by(show: Callable[..., None]) -> None:
    """Replace the functions that print the error at a program's end by `show`; can be called again.

    `show` gets Metaflow's own function and then that function's arguments. If the names are missing, Metaflow prints
    every error itself.
    """
    cli = sys.modules.get("metaflow.cli")
    for name in () if cli is None else ("print_metaflow_exception", "print_unknown_exception"):
        with convenience("the last line about a failed gang on the submitting machine"):
            printer = getattr(cli, name)
            if not isinstance(printer, partial):
                setattr(cli, name, partial(show, printer))


def failed_task(error: BaseException) -> re.Match[str] | None:
    """Return a match with the failed ``step`` and ``task`` of a run's error; `TaskFailed` has only its text."""
    if type(error).__name__ != "TaskFailed":
        return None
    return re.match(
        r"Step \*?(?P<step>\w+)\*?(?: \(task-id (?P<task>[^)\s]+)\))?", str(getattr(error, "message", error))
    )
