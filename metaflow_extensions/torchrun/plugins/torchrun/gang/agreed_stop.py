"""The one call of `metaflow_torchrun.stopping` at which all ranks of a generation stop. Pure.

The nodes have their ranks wait, each in its next call, and tell which that is. The last of these calls is the first one that
all ranks can still reach: those before it go on until there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ..texts import names


@dataclass
class AgreedStop:
    """Who wants the ranks to stop, and where they do."""

    asked: Any = None  # the question of a command; None: a node is told to end
    until: float = float("inf")  # when a command's question is given up
    next: dict[int, int] = field(default_factory=dict)  # node -> the next call of its ranks; 0: they do not call it
    call: int | None = None  # None: not known yet; 0: none stops
    why: str = ""  # none does

    def decide(self, running: Collection[int], is_late: bool) -> bool:
        """Name the call, as soon as all `running` nodes have told, or a command's time is up; return whether it is new."""
        found = [self.next.get(node) for node in running]
        if self.call is not None or (None in found and not is_late):
            return False
        known = [each or 0 for each in found]
        # For a command, ranks that go on would wait for those that stop. Before a loss all end in any case.
        self.call = max(known, default=0) if self.asked is None or all(known) else 0
        self.why = "" if self.call else self._why_not(running)
        return True

    def _why_not(self, running: Collection[int]) -> str:
        """Say why no rank stops."""
        silent = sorted(node for node in running if node not in self.next)
        if silent:
            return f"{names(silent)} did not answer in time"
        without = sorted(node for node in running if not self.next[node])
        return f"{names(without)}: not all ranks there have called metaflow_torchrun.stopping()"
