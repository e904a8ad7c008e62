"""`Event`: a change on one node, in words for its log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
    is_written: bool = False  # whether the log has it already


Subscriber = Callable[[Event], None]


def label(node: int, num_nodes: int) -> str:
    """Return what our own lines in a log begin with; a single node has no number."""
    return "[torchrun] " if num_nodes == 1 else f"[torchrun node {node}] "
