"""The step's ``@timeout``: when it ends the gang, and our handler in place of Metaflow's.

Metaflow's handler raises wherever the main thread is, and puts the stack there into its headline
(`TimeoutDecorator` in ``metaflow/plugins/timeout_decorator.py``, 2.19). It has none on a control node.

On Kubernetes, AWS Batch and Argo Workflows Metaflow also makes ``@timeout`` the time limit of the pod or job
(`get_run_time_limit_for_task`, 2.19). That counts from the start of the pod, so it would always end first, and with a
SIGKILL. So there the gang ends before the pod, by the time that the workers may take to save.
"""

from __future__ import annotations

import signal
import threading
import time
from functools import cache
from types import FrameType
from typing import NamedTuple

from ..compat.steps import is_local, seconds_of_alarm
from ..errors import LaunchTimeout
from ..gang.policy import Rules
from ..machine.container import age_s
from . import orders
from .member import Member

_LEAST_S = 0.01  # an alarm in 0 s is none


class TimeLimit(NamedTuple):
    """The end of a step's time."""

    ends_at: float  # in monotonic seconds
    text: str  # "it ran " stands before it


def time_limit(timeout_s: float, began_at: float, grace_s: float) -> TimeLimit:
    """Return when a step must end whose ``@timeout`` has `timeout_s`; `began_at` is its begin, in monotonic seconds."""
    text = f"longer than the step's @timeout of {timeout_s:g} s allows"
    if is_local():
        return TimeLimit(began_at + timeout_s, text)
    pod_began_at = min(began_at, time.monotonic() - age_s())  # its age may not be known
    if pod_began_at + timeout_s < began_at:  # it would have been killed: this is not its age
        pod_began_at = began_at
    kept_s = min(Rules(grace_s=grace_s).stop_s, timeout_s / 4)
    before = f"from the start of the pod or container, {began_at - pod_began_at:.0f} s before the gang's"
    return TimeLimit(
        pod_began_at + timeout_s - kept_s, f"{text} (it counts {before}; the last {kept_s:.0f} s are left for saving)"
    )


@cache
def _began_at() -> float:
    """Return when this was asked for the first time: a task runs one step, perhaps with several launches."""
    return time.monotonic()


class StepTimeout:
    """Replaces Metaflow's handler of the alarm, if there is one, until `end`."""

    # The handler runs in the main thread, like everything else here.

    def __init__(self, grace_s: float) -> None:
        self._member: Member | None = None
        self._former = signal.getsignal(signal.SIGALRM)
        seconds = seconds_of_alarm(self._former)
        if seconds is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, self._on_alarm)
            now = time.monotonic()
            limit = time_limit(seconds, _began_at(), grace_s)
            self._text = limit.text
            if not is_local():
                signal.setitimer(signal.ITIMER_REAL, max(_LEAST_S, limit.ends_at - now))

    def tell(self, member: Member) -> None:
        """From now on the alarm interrupts what `member` does; before, while the node waits for its gang, it raises."""
        self._member = member

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._member is None:
            raise LaunchTimeout(f"The node waited for its gang {self._text}.")
        orders.time_out(self._member, self._text)

    def end(self) -> None:
        """Restore Metaflow's handler."""
        if signal.getsignal(signal.SIGALRM) == self._on_alarm:
            signal.signal(signal.SIGALRM, self._former)
