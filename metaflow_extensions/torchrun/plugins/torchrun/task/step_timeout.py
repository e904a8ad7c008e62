"""The step's ``@timeout``: when it ends the gang, by our handler (`orders`) in place of Metaflow's.

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
from typing import NamedTuple

from ..compat.steps import is_local, seconds_of_alarm
from ..gang.policy import Rules
from ..machine.pods import age_s

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
    earlier_s = began_at - min(began_at, time.monotonic() - age_s())  # the pod's age may not be known
    if earlier_s > timeout_s:  # it would have been killed: this is not its age
        earlier_s = 0.0
    kept_s = min(Rules(grace_s=grace_s).stop_s, timeout_s / 4)
    text += f" (it counts from the start of the pod or container, {earlier_s:.0f} s before the gang's; "
    return TimeLimit(began_at - earlier_s + timeout_s - kept_s, f"{text}the last {kept_s:.0f} s are left for saving)")


@cache
def _began_at() -> float:
    """Return when this was asked for the first time: a task runs one step, perhaps with several launches."""
    return time.monotonic()


def alarm_text(grace_s: float) -> str | None:
    """Return how the alarm of the step's ``@timeout`` is told, and have it come in time; None if Metaflow has set none."""
    seconds = seconds_of_alarm(signal.getsignal(signal.SIGALRM))
    if seconds is None or threading.current_thread() is not threading.main_thread():
        return None
    limit = time_limit(seconds, _began_at(), grace_s)
    if not is_local():
        signal.setitimer(signal.ITIMER_REAL, max(_LEAST_S, limit.ends_at - time.monotonic()))
    return limit.text
