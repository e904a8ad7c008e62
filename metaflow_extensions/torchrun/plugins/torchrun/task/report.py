"""Prints the error that ends a task, or that keeps a run from starting.

Metaflow's own printing (`print_metaflow_exception` and `print_unknown_exception` in ``metaflow/cli.py``, 2.19) drops
every ``*``, which it takes for a mark of bold, and shows each frame between its command line and the step's code. So
this module prints our errors, and in a task of a ``@torchrun`` step also what the step's code has raised.

All nodes raise the same error. On a local run they share one terminal: one node prints the error, the others name
that node. A traceback that a worker has written into the same log is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..compat.cli import MetaflowException, print_errors_by
from ..errors import TorchrunError
from ..gang.cause import ENDS, Cause, cause_of, failure_of
from ..gang.failures import summary, teller
from ..tracebacks import user_traceback
from .console import write

_INDENT = "    "  # as Metaflow has it
# Causes whose details the failed worker itself has written.
_WRITTEN = ("exception", "exit", "signal", "oom", "command")


def report(
    error: BaseException, node: int, shared: bool, known: bool, stands_above: Callable[[Cause], bool]
) -> str | None:
    """Return the lines to print for `error` at the end of the task of `node`; None lets Metaflow print it.

    `shared`: all nodes write to one terminal. `known`: the gang has this error, so all nodes raise it. `stands_above`
    tells whether this log has all that the failed worker wrote.
    """
    of_a_rank = error.__cause__ if isinstance(error.__cause__, TorchrunError) else None
    verdict = error if isinstance(error, TorchrunError) and failure_of(error) is not None else of_a_rank or error
    if not isinstance(verdict, TorchrunError):
        return None if isinstance(error, MetaflowException) else _barred(user_traceback(error))
    failure, cause = failure_of(verdict), cause_of(verdict)
    kind = None if cause is None else cause.kind
    is_own = cause is not None and (kind, cause.node) == ("lost", node)  # no other node hears that
    if shared and kind == "interrupted":  # Metaflow says so
        return ""
    if shared and known and teller(cause) != node and not is_own:
        # One line, which may be the last of the terminal. A hang and a timeout concern the launch as a whole.
        told = "" if cause is None or kind in ("hang", "timeout", "call") else summary(cause)
        told = f"{told[:1].upper()}{told[1:]}{'.' if told and not told.endswith(ENDS) else ''}"
        if failure is not None and failure.cause.is_consequence:
            told = f"{failure.before.strip()} {told}".strip()  # who had ended before tells more than a lost connection
        # A node that is told to end may be interrupted as well, and show nothing.
        where = "" if kind == "terminated" else f"Node {teller(cause)} shows the whole error."
        return " ".join(filter(None, (f"{verdict.headline}:", told, where)))
    trace = "" if error is verdict else _barred(user_traceback(error, with_cause=False))
    if failure is not None and failure.cause.kind in _WRITTEN and stands_above(failure.cause):
        if not trace:
            return _headed(verdict, failure.without_detail())
        # The traceback already ends with the exception and its rank.
        return f"{trace}\n{failure.without_report()}"
    return f"{_headed(verdict, verdict.message)}\n{trace}".rstrip("\n")


def _headed(error: TorchrunError, message: str) -> str:
    return "\n".join(f"{_INDENT}{line}" for line in f"{error.headline}: {message}".split("\n"))


def _barred(text: str) -> str:
    # Metaflow's console strips leading spaces; behind the bar the indentation survives.
    return "\n".join(f"  | {line}" for line in text.split("\n"))


# --- Metaflow's printing --------------------------------------------------------------------------

# The error that ends this task, and its text; only the main thread sets and reads it.
_end: tuple[BaseException, str] | None = None
_in_task = False
# Functions that return further lines after an error, or nothing. Only the main thread sets and calls them.
_afterwards: list[Callable[[BaseException], str | None]] = []


def end_with(error: BaseException, text: str | None) -> None:
    """Show `text`, or nothing if it is empty, when Metaflow comes to print `error`; None leaves it to Metaflow."""
    global _end
    _end = None if text is None else (error, text)


def print_errors_ourselves(in_task: bool) -> None:
    """Replace Metaflow's printing of our errors; in a task of ours, of all errors. Can be called again."""
    global _in_task
    _in_task = _in_task or in_task
    print_errors_by(_print_error)


def tell_after_errors(tell: Callable[[BaseException], str | None]) -> None:
    """Call `tell` with each error that Metaflow has printed, and write the result to stderr."""
    _afterwards.append(tell)


def _print_error(original: Callable[..., None], error: Any, *more: Any, **options: Any) -> None:
    if _end is not None and _end[0] is error:
        write("stderr", _end[1] and f"{_end[1]}\n")
    elif isinstance(error, TorchrunError):
        write("stderr", f"{_headed(error, error.message)}\n")
    elif _in_task and not isinstance(error, MetaflowException):
        write("stderr", f"{_barred(user_traceback(error))}\n")
    else:
        original(error, *more, **options)
    for tell in _afterwards:
        with suppress(Exception):  # it asks servers, and rests on Metaflow's private names; the error itself is shown
            write("stderr", tell(error) or "")
