"""Private names of Metaflow's command line: how it prints errors, and how commands are made.

Read in ``metaflow/cli.py``, ``exception.py`` and ``runtime.py`` of 2.13 and 2.19.39.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import TorchrunError
from .renamed import convenience, known

# Metaflow loads our commands for every flow, also for one without a step of ours. That must not fail.
click: Any = known("metaflow._vendor.click:")  # without it the extension registers no commands
MetaflowException: type = known("metaflow.exception:MetaflowException", TorchrunError)
CommandException: Any = known("metaflow.exception:CommandException", TorchrunError)


def print_errors_by(show: Callable[..., None]) -> None:
    """Replace the functions that print the error at a program's end by `show`; can be called again.

    `show` gets Metaflow's own function and then that function's arguments.
    """
    cli = sys.modules.get("metaflow.cli")
    with convenience("our own print of errors"):
        for name in () if cli is None else ("print_metaflow_exception", "print_unknown_exception"):
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
