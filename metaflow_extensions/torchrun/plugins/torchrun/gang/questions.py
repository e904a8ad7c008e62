"""Questions to the nodes about their workers. Pure.

A command stores a request beside the gang's view. The control node's task finds it and hands it to the machine, which asks
the nodes. When all have answered, or their time is up, the answer is stored. In a hang the machine asks for stacks by
itself, and before a loss it has the ranks stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..texts import names
from .limits import NODES_MARGIN_S, PROFILE_S, WORKERS_S
from .messages import What

HANG, PREEMPTED = "hang", "preempted"
"""What the machine asks by itself."""
LIMITS: dict[What, float] = {"stacks": WORKERS_S + NODES_MARGIN_S, "stop": NODES_MARGIN_S, "profile": PROFILE_S}
"""How long its answers are waited for, in seconds."""
NO_WORKERS = "has no workers"


class Question:
    """What was asked about a launch and its generation, and what these nodes have answered; see `messages.Ask`."""

    def __init__(self, what: What, about: tuple[int, int], nodes: Iterable[int], due_at_s: float) -> None:
        self.what, self.about, self._due_at_s = what, about, due_at_s
        self.found: dict[int, Any] = dict.fromkeys(nodes)
        """The answer by node, or a text that says why there is none; None: it has not answered."""

    def keep(self, node: int, found: Any) -> None:
        """Keep a node's answer, or why there is none; what comes first counts."""
        if self.found.get(node, found) is None:
            self.found[node] = found

    def is_over(self, now_s: float) -> bool:
        """Return whether all nodes have answered, or their time is up."""
        return None not in self.found.values() or now_s >= self._due_at_s

    def agreed_call(self, needs_all: bool) -> tuple[int, str]:
        """Return the call of `metaflow_torchrun.stopping` at which all ranks stop; 0, and why, where none does.

        The ranks of each node wait in their next call. The last of these calls is the first one that all can still
        reach: those before it go on until there. `needs_all`: ranks that go on would wait for those that stop.
        """
        told = {node: found for node, found in self.found.items() if not isinstance(found, str)}
        late = [node for node, call in told.items() if call is None]
        without = sorted(node for node, call in told.items() if not call)
        call = max((call or 0 for call in told.values()), default=0)
        if call and not (needs_all and without):
            return call, ""
        if not told:
            return 0, "its workers have ended meanwhile" if self.found else "no worker runs, or they are about to end"
        if late:
            return 0, f"{names(sorted(late))} did not answer in time"
        return 0, f"{names(without)}: not all ranks there have called metaflow_torchrun.stopping()"

    def profile(self) -> dict[str, Any]:
        """Return where the profile is stored, or why there is none."""
        if not self.found:
            return {"why": "no such rank runs"}
        (found,) = self.found.values()
        return found if isinstance(found, dict) else {"why": f"its node {found or 'has not answered in time'}"}
