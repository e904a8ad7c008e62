"""What happens to a gang, as a stream of records: one object for every change of state.

The supervisor and the membership emit, whoever is interested subscribes; today that is the node's
log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .console import write_output

Kind = Literal["chosen", "command", "worker_failed", "stopping", "failed", "left_behind", "restart", "evidence", "note"]


@dataclass(frozen=True)
class Event:
    """One change of state on one node.

    Attributes
    ----------
    kind : str
        What happened.
    node : int
        On which node.
    text : str
        The same in words, for the log; empty if it is not worth a line.
    launch : int or None
        In which launch.
    facts : dict
        Further JSON-able facts.
    at : float
        Seconds since the epoch.
    """

    kind: Kind
    node: int
    text: str = ""
    launch: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.time)


Subscriber = Callable[[Event], None]

# With a reader that takes nothing; threads that tell of something have more to do than to wait for it.
_PATIENCE_S = 0.5


def to_log(event: Event) -> None:
    """Write an event that has a text to the node's log, on stderr as Metaflow's own words are."""
    if event.text:
        text = "".join(f"[torchrun node {event.node}] {line}\n" for line in event.text.splitlines())
        write_output("stderr", text, _PATIENCE_S)
