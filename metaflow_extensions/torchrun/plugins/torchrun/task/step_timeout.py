"""Replaces Metaflow's handler of the step's ``@timeout``, so that it ends the gang in order.

Metaflow's handler raises wherever the main thread is, and puts the stack there into its headline
(`TimeoutDecorator` in ``metaflow/plugins/timeout_decorator.py``, 2.19). It has none on a control node.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from ..compat.steps import seconds_of_alarm
from ..errors import LaunchTimeout
from ..gang.member import Member


class StepTimeout:
    """Replaces Metaflow's handler of the alarm, if there is one, until `end`."""

    # The handler runs in the main thread, like everything else here.

    def __init__(self) -> None:
        self._member: Member | None = None
        self._former = signal.getsignal(signal.SIGALRM)
        seconds = seconds_of_alarm(self._former)
        if seconds is not None and threading.current_thread() is threading.main_thread():
            self._text = f"longer than the step's @timeout of {seconds} s allows"
            signal.signal(signal.SIGALRM, self._on_alarm)

    def tell(self, member: Member) -> None:
        """From now on the alarm calls `member.time_out`; before, while the node waits for its gang, the alarm raises."""
        self._member = member

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._member is None:
            raise LaunchTimeout(f"The node waited for its gang {self._text}.")
        self._member.time_out(self._text)

    def end(self) -> None:
        """Restore Metaflow's handler."""
        if signal.getsignal(signal.SIGALRM) == self._on_alarm:
            signal.signal(signal.SIGALRM, self._former)
