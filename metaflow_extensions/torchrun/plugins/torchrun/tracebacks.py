"""Cuts tracebacks to the user's own frames, without those of Metaflow and of this package."""

from __future__ import annotations

import os
import traceback
from traceback import TracebackException

import metaflow

from .errors import TorchrunError

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_METAFLOW = os.path.dirname(os.path.abspath(metaflow.__file__)) + os.sep


def words_of(error: BaseException) -> str:
    """Return type and text of an exception; its class may fail when it is asked for a text."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception as problem:
        return f"{type(error).__name__} (its __str__ raises {type(problem).__name__})"


def user_traceback(error: BaseException, with_cause: bool = True) -> str:
    """Return an exception's traceback from the first line of the user's code on.

    An error without such a line is a bug of ours or of Metaflow's, so all its frames are kept.
    """
    report = TracebackException.from_exception(error)
    if not with_cause:
        report.__cause__, report.__suppress_context__ = None, True
    part: TracebackException | None = report
    while part is not None:
        _cut(part.stack, _is_handed_on(error))
        part = part.__cause__ or part.__context__
    return "".join(report.format()).rstrip("\n")


def cut_frames_around(error: BaseException) -> None:
    """Take our frames and those of Metaflow's ``@parallel`` out of an exception; safe to call more than once.

    Metaflow's own frames, nearer to the command line, stay. ``@catch`` shows what `format_exc` makes of the exception,
    and Metaflow keeps that. A notebook shows all frames that are left.
    """
    if isinstance(error.__cause__, TorchrunError):  # raised by us alone
        error.__cause__.__traceback__ = None
    before = error.__traceback__
    while before is not None:
        after = before.tb_next
        while after is not None and _is_wrapper(after.tb_frame.f_code.co_filename):
            after = after.tb_next
        if after is not None or _is_handed_on(error):
            before.tb_next = after
        before = after


def _is_handed_on(error: BaseException) -> bool:
    """Return whether `error` stands for what happened elsewhere: in the gang, in a worker, or at the keyboard."""
    is_ours = isinstance(error, TorchrunError) or isinstance(error.__cause__, TorchrunError)
    return is_ours or isinstance(error, KeyboardInterrupt)


def _is_wrapper(filename: str) -> bool:
    return filename.startswith(_OURS) or filename == os.path.join(_METAFLOW, "plugins", "parallel_decorator.py")


def _cut(stack: traceback.StackSummary, handed_on: bool) -> None:
    """Leave out the frames before the user's first, and after the last those that only handed the error on."""
    users = [i for i, frame in enumerate(stack) if not frame.filename.startswith((_OURS, _METAFLOW))]
    if users:
        stack[:] = stack[users[0] : users[-1] + 1 if handed_on else len(stack)]
    elif handed_on:
        stack.clear()
