"""`Event`: a change on one node, in words for its log."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

DEBUG = "METAFLOW_TORCHRUN_DEBUG"
"""Environment variable: ``1`` has the details written, too."""

Kind = Literal[
    "chosen", "command", "facts", "ended", "worker_failed", "stopping", "failed", "left_behind", "restart", "note"
]


@dataclass(frozen=True)
class Event:
    """One change of state on one node."""

    kind: Kind
    node: int
    text: str  # what happened, in words for the log
    is_detail: bool = False  # whether only METAFLOW_TORCHRUN_DEBUG=1 shows it


def label(node: int, num_nodes: int) -> str:
    """Return what our own lines in a log begin with; a single node has no number."""
    return "[torchrun] " if num_nodes == 1 else f"[torchrun node {node}] "


def event_text(event: Event, num_nodes: int) -> str:
    """Return an event's lines in the log; of details none without `DEBUG`."""
    if event.is_detail and os.environ.get(DEBUG, "") in ("", "0"):
        return ""
    return "".join(f"{label(event.node, num_nodes)}{line}\n" for line in event.text.splitlines())
