"""Decides which node can't reach torch's store on the control node. Pure.

All nodes are asked when the launch does not begin, and once more when one has failed: the network may have been mended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .messages import CONTROL
from .texts import names
from .wire import from_plain

UNREACHABLE = "unreachable"  # the kind of the cause


@dataclass(frozen=True)
class Unreached:
    """What a node tells that can't reach the store."""

    number: int  # of the question
    address: str
    port: int
    why: str


class Reach:
    """The questions of one generation; a node that fails twice is the cause."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the generation before."""
        self._number = 0  # of the last question
        self._first: dict[int, int] = {}  # node -> the question that it has failed at first
        self._guilty: dict[int, Unreached] = {}  # nodes that have failed again

    def take(self, node: int, data: Mapping[str, Any]) -> int | None:
        """Return the number of a question to all nodes, where there is a reason for one."""
        if "waits" in data:
            is_due = self._number == 0
        else:
            found: Unreached = from_plain(Unreached, data, "reach")
            is_again = found.number > self._first.setdefault(node, found.number)
            if is_again:
                self._guilty[node] = found
            is_due = not is_again and found.number == self._number
        self._number += is_due
        return self._number if is_due else None

    def found(self, host: str) -> tuple[int, str, str] | None:
        """Return a node that can't reach the store on the control node's `host`, why, and what to change."""
        if not self._guilty:
            return None
        node, found = min(self._guilty.items())
        others = sorted(self._guilty.keys() - {node})
        neither = f"; {names(others)} can't either" if others else ""
        where = f"torch's store on node {CONTROL} (host {host}): tried {found.address} on port {found.port}"
        advice = (
            f"Open TCP port {found.port} between the nodes (network policy, security group, firewall), or pin a port that "
            "is open by @torchrun(master_port=...)."
        )
        return node, f"can't reach {where}: {found.why}{neither}", advice
