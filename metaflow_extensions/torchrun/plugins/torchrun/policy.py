"""What is to be done with a launch when: time limits, restarts, hangs, preemptions."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .devices import parse_int
from .errors import TorchrunConfigError

# The classes of causes (see `failure.Cause.category`) that a new generation on the same nodes may mend.
RETRY_CLASSES = ("user", "killed", "timeout", "hang", "start")
DEFAULT_RETRY_ON = frozenset({"user", "killed", "timeout", "hang"})
_NEVER_RETRIED = {
    "node_lost": "the nodes that are left can't bring one back; use Metaflow's @retry",
    "preempted": "the nodes that are left can't bring one back; use Metaflow's @retry",
    "store": "the function has ended well, and to run it again mends no datastore; use Metaflow's @retry",
}


@dataclass(frozen=True)
class LaunchPolicy:
    """What is to be done with a launch when; the control node's counts for all.

    Attributes
    ----------
    timeout_s : float or None
        How long one generation may run, from *go* to its end. As Metaflow's ``@timeout`` counts for each
        attempt, so does this for each restart.
    left_s : float or None
        What is left of the step's ``@timeout``, which bounds all generations together.
    hang_timeout_s : float or None
        How long no rank may write or exit; None does not look.
    max_restarts : int
        How often the gang may be restarted.
    retry_on : frozenset of str
        The classes of causes that restart it.
    preemption_signal : int
        What workers get when a node is preempted.
    min_nodes : int or None
        How many nodes must be left where torchrun's own elasticity is used; None: all, which is the rule.
    """

    timeout_s: float | None = None
    left_s: float | None = None
    hang_timeout_s: float | None = None
    max_restarts: int = 0
    retry_on: frozenset[str] = DEFAULT_RETRY_ON
    preemption_signal: int = signal.SIGTERM
    min_nodes: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {**asdict(self), "retry_on": sorted(self.retry_on)}

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> LaunchPolicy:
        """Return the policy that `to_wire` described."""
        return LaunchPolicy(**{**data, "retry_on": frozenset(data.get("retry_on", DEFAULT_RETRY_ON))})


def parse_retry_on(value: Any, setting: str) -> frozenset[str] | None:
    """Return the classes of causes that restart the gang; None stays None.

    Parameters
    ----------
    value : str, sequence of str or None
        Names out of `RETRY_CLASSES`; in a string with commas between.
    setting : str
        How to call the setting in an error.

    Raises
    ------
    TorchrunConfigError
        If a name is unknown, or of a class that a restart can't mend.
    """
    if value is None:
        return None
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, (list, tuple, set, frozenset)) or not all(isinstance(word, str) for word in words):
        raise TorchrunConfigError(f"{setting} is {value!r}, but it must be a list out of {', '.join(RETRY_CLASSES)}.")
    names = frozenset(word.strip() for word in words if word.strip())
    for name in sorted(names - set(RETRY_CLASSES)):
        why = _NEVER_RETRIED.get(name, "there is no such class of causes")
        raise TorchrunConfigError(f"{setting} has {name!r}, but {why}. Choose out of {', '.join(RETRY_CLASSES)}.")
    return names


def parse_signal(value: Any, setting: str) -> int | None:
    """Return a signal, given by name (``"SIGUSR1"``, ``"usr1"``) or number, as a number; None stays None.

    Raises
    ------
    TorchrunConfigError
        If there is no such signal, or none that a process could heed.
    """
    if value is None:
        return None
    text = str(value).strip().upper()
    number = int(text) if text.isdecimal() else getattr(signal, text if text.startswith("SIG") else f"SIG{text}", None)
    if isinstance(value, bool) or number not in signal.valid_signals():
        raise TorchrunConfigError(f"{setting} is {value!r}, but it must be a signal, such as 'SIGUSR1'.")
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise TorchrunConfigError(f"{setting} is {value!r}, which no process can heed to save its work.")
    return int(number)


def parse_restarts(value: Any, setting: str) -> int | None:
    """Return a number of restarts as an int; None stays None.

    Raises
    ------
    TorchrunConfigError
        If it is no whole number of at least 0.
    """
    if value is None:
        return None
    number = parse_int(value)
    if number is None or number < 0:
        raise TorchrunConfigError(f"{setting} is {value!r}, but it must be a whole number of at least 0.")
    return number
