"""Work that is done now and then in a thread, which is there only while it works: the step's own code may fork.

The supervisor says when it is due: see `ControlSide.look_in`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from ..machine import native

Pauses: TypeAlias = "tuple[float, float]"
"""In how many seconds it is due again: if there is news of the gang, and in any case (perhaps infinite)."""
NEVER = float("inf")
_AGAIN: Pauses = (30.0, 30.0)  # after a work that could not begin, or has raised
_LOOK_S = 0.01


class Work:
    """`do` is done in a thread; `tell` gets when it is due again."""

    def __init__(self, do: Callable[[], Pauses], tell: Callable[[Pauses], None]) -> None:
        self._do, self._tell = do, tell
        self._is_wanted = False
        self._turn: deque[None] = deque([None])  # empty while a thread works; `pop` lets one thread in

    def begin(self) -> None:
        """Do it now, and once more if that is being done. Any thread and any signal handler may call it."""
        self._is_wanted = True
        if self._turn:
            # `Thread.start` takes locks, which the main thread may hold when a signal handler is called.
            try:
                native.start_new_thread(self._run, ())
            except RuntimeError:  # no more threads
                self._is_wanted = False
                self._tell(_AGAIN)

    def settle(self, patience_s: float) -> bool:
        """Wait for the end of what is being done, or so long; return whether it has ended."""
        deadline = time.monotonic() + patience_s
        while (is_working := self._is_wanted or not self._turn) and time.monotonic() < deadline:
            native.sleep(_LOOK_S)
        return not is_working

    def _run(self) -> None:
        try:
            self._turn.pop()
        except IndexError:  # another thread works, and sees what is wanted
            return
        pauses = None
        try:
            while self._is_wanted:
                self._is_wanted, pauses = False, _AGAIN
                pauses = self._do()
        finally:
            self._turn.append(None)
            if pauses is not None:
                self._tell(pauses)
            if self._is_wanted:
                self.begin()
