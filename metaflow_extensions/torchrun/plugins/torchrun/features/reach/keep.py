"""Decides, on the control node, which node can't reach torch's store."""

from __future__ import annotations

from collections.abc import Callable

from ...gang.keepers import Failing, Keeper, Plain, Remarks, Where
from ...gang.messages import CONTROL, Report
from ...gang.texts import names
from ...gang.wire import from_plain
from .told import KIND, Unreached


class ReachKeeper(Keeper):
    """Asks all nodes when the launch does not begin, and once more when one has failed."""

    has_record = False

    @classmethod
    def of(cls, num_nodes: int) -> Keeper | None:
        """Return what asks the nodes; a gang of one reaches its own store."""
        return cls() if num_nodes > 1 else None

    def __init__(self) -> None:
        self._number = 0  # of the last question
        self._first: dict[int, int] = {}  # node -> the question that it has failed at first
        self._guilty: dict[int, Unreached] = {}  # nodes that have failed again

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Forget the generation before."""
        self._number = 0
        self._first.clear()
        self._guilty.clear()

    def handle(self, node: int, told: Report, at_s: float) -> Remarks | None:
        """Ask all nodes where there is a reason."""
        if "waits" in told.data:
            return self._ask() if self._number == 0 else None
        found = from_plain(Unreached, told.data, "reach")
        if found.number > self._first.setdefault(node, found.number):
            self._guilty[node] = found
            return None
        return self._ask() if found.number == self._number else None

    def _ask(self) -> Remarks:
        self._number += 1
        return Remarks(ask={"number": self._number})

    def tick(self, at_s: float, where: Callable[[int], Where]) -> Remarks:
        """Let the launch fail if a node can't reach the store."""
        if not self._guilty:
            return Remarks()
        node, found = min(self._guilty.items())
        others = sorted(self._guilty.keys() - {node})
        neither = f"; {names(others)} can't either" if others else ""
        text = (
            f"can't reach torch's store on node {CONTROL} (host {where(CONTROL).host}): "
            f"tried {found.address} on port {found.port}: {found.why}{neither}"
        )
        advice = (
            f"Open TCP port {found.port} between the nodes (network policy, security group, firewall), or pin a port that "
            "is open by @torchrun(master_port=...)."
        )
        return Remarks(failing=Failing(KIND, text, node, advice))


PART = ReachKeeper
