"""Signals of a task: orders to end, and the supervisor's call to read what it says.

While our code waits, a handler only sends a frame and sets a flag, and the wait raises; a second Ctrl-C raises at once. In
the step's own code handlers raise. They are there from the join until Metaflow stores the results. Python runs them in the
main thread, between two instructions, and lets only that thread set them. A fork of the task gets the former ones back.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from .link import forget_all

SIGTERM_CAME = "its Metaflow task got SIGTERM"
_member: Any = None  # the `task.member.Member`, which imports this, whose signals these are
_former: dict[int, Any] = {}
_fork = threading.local()
_is_reading = False  # whether the handler of SIGURG reads: others leave the raising to it


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def begin(member: Any) -> None:
    """Handle the signals for a member; nothing outside of the main thread."""
    global _member
    if not _is_main():
        return
    _member = member
    for number, handler in _HANDLERS.items():
        # A handler of the step's own stays where it says what Ctrl-C does.
        is_own = number == signal.SIGINT and signal.getsignal(number) is not signal.default_int_handler
        if not is_own:
            _former[number] = signal.signal(number, handler)


def end(member: Any) -> None:
    """Handle them no more for a member; the former handlers are back."""
    global _member
    if _is_main() and member is _member:
        _restore()
        _member = None


def _restore() -> None:
    for number, former in _former.items():
        if signal.getsignal(number) is _HANDLERS[signal.Signals(number)]:  # otherwise the step has set another one
            with suppress(TypeError):  # a handler not set from Python can't be set back
                signal.signal(number, former)
    _former.clear()


# --- handlers -------------------------------------------------------------------------------------


def _is_left_to_others() -> bool:
    """Return whether somebody waits, or reads, who raises what comes."""
    return _is_reading or _member.link.waiter == threading.main_thread().ident


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # it stands for Ctrl-C here: see `interrupts`
        _on_sigint(number, frame)
        return
    if not _member.order(SIGTERM_CAME, is_now=not _is_left_to_others()):
        _restore()
        signal.raise_signal(number)


def _on_sigint(number: int, frame: FrameType | None) -> None:
    if not _is_left_to_others() or _member.is_interrupted:
        raise KeyboardInterrupt
    _member.interrupt()


def _on_sigurg(number: int, frame: FrameType | None) -> None:
    global _is_reading
    if _is_left_to_others():
        return  # who waits reads; the signal comes again until somebody has read
    member, _is_reading = _member, True
    try:
        if member.link.waiter is None:
            member.link.read()
    finally:
        _is_reading = False
    member.raise_news()


_HANDLERS = {signal.SIGTERM: _on_sigterm, signal.SIGINT: _on_sigint, signal.SIGURG: _on_sigurg}


def _before_fork() -> None:
    # A SIGTERM that arrives between the fork and `_in_child` must stay pending: Python forgets a signal that came before its
    # handler was set back to the default.
    if _member is not None:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if (mask := _fork.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    global _member
    _member = None
    if _former and _is_main():
        _restore()
    forget_all()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
