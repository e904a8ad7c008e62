"""Interrupts the step's own code with the gang's news, and handles SIGTERM.

The member's `State` decides whether the step's code is interrupted. In a launch the supervisor is told instead.

Who may touch what. Python runs signal handlers in the main thread, between two instructions of whatever runs there. The
handler of SIGTERM only records it and sends the wake signal. The handler of the wake signal reads what the supervisor says,
unless somebody does so already, and lets the member raise its news out of the step's code. It waits for nothing. The
supervisor sends the wake signal, and repeats it until the task has read (`machine/wake`); the kernel sends it at the
supervisor's end. `wake` may be called in any thread; handlers are set and restored in the main thread alone, since Python
allows it nowhere else. `_active` changes only there.

A forked child shares none of this: its handlers are the former ones.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

from ..machine import native
from ..machine.wake import SIGNAL
from .protocol import TaskLink

# Known before the step's code begins: gevent would tell the number of a greenlet, which `pthread_kill` does not survive.
_MAIN = threading.main_thread().ident or 0


class Interrupted(Protocol):
    """What is interrupted: `gang.member.Member`. All but `link` is called in a signal handler, in the main thread."""

    @property
    def link(self) -> TaskLink | None:
        """The task's end of its connection to the gang."""

    def notice_here(self, why: str) -> None:
        """End this node as after a SIGTERM."""

    def has_news(self) -> bool:
        """Return whether the step's own code must be interrupted."""

    def record_sigterm(self) -> bool:
        """Keep a SIGTERM for `raise_news`; return whether this member handles it."""

    def raise_news(self) -> None:
        """Raise the gang's error or the order to end, once."""


class Wakeup:
    """The signal handlers of one member. If several members have set theirs, the last one's are in force."""

    def __init__(self, member: Interrupted) -> None:
        self.member = member
        self._handlers = {int(signal.SIGTERM): self._on_sigterm, SIGNAL: self._on_wake}
        self._former: dict[int, Any] = {}
        self._is_cut = False  # whether another handler has raised in the midst of ours

    def set_handlers(self) -> None:
        """Set the handlers; does nothing outside of the main thread, since Python allows it only there."""
        if threading.current_thread() is threading.main_thread():
            _active.append(self)
            for number, handler in self._handlers.items():
                self._former[number] = signal.signal(number, handler)
            if self.member.link is not None:
                self.member.link.signal_end(True)

    def restore_handlers(self) -> None:
        """Set the former handlers, unless the step has set others meanwhile.

        Only the main thread can, and only when the member will have no more news.
        """
        if threading.current_thread() is not threading.main_thread() or self not in _active:
            return
        _active.remove(self)
        if self.member.link is not None:
            self.member.link.signal_end(False)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == handler:
                with suppress(TypeError):  # a handler not set from Python can't be set back
                    signal.signal(number, self._former[number])

    @property
    def innermost(self) -> Interrupted:
        """The member that handles what concerns the whole task: the innermost one, if members are nested."""
        return _active[-1].member if self in _active else self.member

    def wake(self) -> None:
        """Have the member's news raised in the main thread soon, even if a call blocks there. Any thread may call it."""
        if self.member.has_news():
            self.wake_again()

    def wake_again(self) -> None:
        """Have the handler run in the main thread soon."""
        # A step may have reset all signals.
        if self in _active and callable(signal.getsignal(SIGNAL)):
            # `interrupt_main` sets Python's own flag for the signal, so here it works even if the step has blocked signals;
            # the supervisor's signal does not. `pthread_kill` sends the real one, which ends a blocking system call.
            _thread.interrupt_main(SIGNAL)  # type: ignore[arg-type]  # an int will do
            if native.get_ident() != _MAIN:
                signal.pthread_kill(_MAIN, SIGNAL)

    # --- in a signal handler --------------------------------------------------------------------

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        former = self._former[number]
        if self.member.record_sigterm():
            _thread.interrupt_main(SIGNAL)  # type: ignore[arg-type]  # its handler runs right after this one
        elif callable(former):  # for example in a child that was forked past Python
            former(number, frame)
        elif former != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _on_wake(self, number: int, frame: FrameType | None) -> None:
        try:
            for each in _active:
                if each.member.link is not None:
                    each.member.link.look()
        except BaseException:  # of another handler, in the midst of this: the signal does not come again
            self._is_cut = not self._is_cut  # once only: what raises each time is a bug of ours
            if self._is_cut:
                self.wake_again()
            raise
        self._is_cut = False
        for each in _active[::-1]:
            each.member.raise_news()


# The members whose handlers are set, the innermost last: a gang's step may use `TorchrunSingleNodeMultiGPU`. Only the
# main thread changes it, and no signal handler does.
_active: list[Wakeup] = []
_fork = threading.local()


def _before_fork() -> None:
    # Runs before each os.fork (os.register_at_fork). A SIGTERM that arrives between the fork and `_in_forked_child` must
    # stay pending: Python forgets a signal that came before its handler was set back to the default.
    if _active:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if (mask := _fork.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_forked_child() -> None:
    """Give a forked child the handlers that were there before ours: our handling of signals is for the task alone."""
    for each in _active[::-1]:
        each.restore_handlers()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_forked_child)
