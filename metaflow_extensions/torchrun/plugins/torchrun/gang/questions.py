"""Questions to the nodes about their workers. Pure.

A command stores a request beside the gang's view. The control node's task finds it and hands it to the machine, which asks
the nodes. When all have answered, or their time is up, the answer is stored. In a hang the machine asks for stacks by
itself, and before a loss it has the ranks stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from ..texts import names
from .limits import NODES_MARGIN_S, PROFILE_S, WORKERS_S
from .messages import What

HANG, PREEMPTED = "hang", "preempted"
"""What the machine asks by itself."""
LIMITS: dict[What, float] = {"stacks": WORKERS_S + NODES_MARGIN_S, "stop": NODES_MARGIN_S, "profile": PROFILE_S}
"""How long its answers are waited for, in seconds."""
NO_WORKERS, LATE = "has no workers", "has not answered in time"


class Question:
    """What was asked about a launch and its generation, and what these nodes have answered; see `messages.Ask`."""

    def __init__(self, what: What, about: tuple[int, int], nodes: Iterable[int], due_at_s: float) -> None:
        self.what, self.about, self._due_at_s = what, about, due_at_s
        self.nodes, self.open = frozenset(nodes), set(nodes)  # who was asked, and who has not answered
        self.found: dict[int, Any] = {}
        """The answer by node, or a text that says why there is none."""

    def keep(self, node: int, found: Any) -> None:
        """Keep a node's answer; the first one counts."""
        if node in self.open:
            self.open.discard(node)
            self.found[node] = found

    def end(self) -> None:
        """Wait for no answer any more, and make nothing of those that have come."""
        self.nodes, self.open, self.found = frozenset(), set(), {}

    def is_over(self, now_s: float, running: Set[int]) -> bool:
        """Return whether all nodes have answered whose workers still run, or their time is up; note the others."""
        if now_s < self._due_at_s and not self.open.isdisjoint(running):
            return False
        self.found.update(dict.fromkeys(self.open - running, NO_WORKERS))
        self.open &= running
        return True

    def agreed_call(self, needs_all: bool) -> tuple[int, str]:
        """Return the call of `metaflow_torchrun.stopping` at which all ranks stop; 0, and why, where none does.

        The ranks of each node wait in their next call. The last of these calls is the first one that all can still
        reach: those before it go on until there. `needs_all`: ranks that go on would wait for those that stop.
        """
        of_nodes = [(node, found) for node, found in self.found.items() if found != NO_WORKERS]
        told = {node: 0 if isinstance(found, str) else found for node, found in of_nodes}
        call, without = max(told.values(), default=0), sorted(node for node, each in told.items() if not each)
        if call and not (needs_all and (without or self.open)):
            return call, ""
        if self.open:
            return 0, f"{names(sorted(self.open))} did not answer in time"
        if without:
            return 0, f"on {names(without)}, not all ranks have called metaflow_torchrun.stopping()"
        return 0, "its workers have ended meanwhile" if self.nodes else "no worker runs, or all are about to end"

    def profile(self) -> dict[str, Any]:
        """Return where the profile is stored, or why there is none."""
        if not self.nodes:
            return {"why": "no such rank runs"}
        found = next(iter(self.found.values()), LATE)
        return found if isinstance(found, dict) else {"why": f"its node {found}"}
