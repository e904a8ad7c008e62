"""Asks the workers of a node what they do now."""

from __future__ import annotations

from typing import Any

from ..gang.limits import WORKERS_S
from ..gang.stacks import NodeStacks
from ..gang.wire import Plain, to_plain
from ..machine.frames import Found
from ..machine.stacks import Question
from .observers import Here, Observer

# All stacks of one node go in one message, in which JSON may double a text. An answer of the whole
# gang is one file.
_NODE_CHARS = 200_000
_GANG_CHARS = 16_000_000


class StacksObserver(Observer):
    """Asks the workers of this node while the launch goes on. A new question takes the place of an open one."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self._id: Any = None
        self._question: Question | None = None

    def ask(self, data: Plain) -> None:
        """Ask the workers."""
        self._id, self._question = data["id"], Question(self._here.running(), WORKERS_S)

    def poll(self) -> Plain | None:
        """Return the answer, when it is there."""
        found = None if self._question is None else self._question.poll()
        if found is None:
            return None
        self._question = None
        here, call = self._here, self._here.call
        share = min(_NODE_CHARS // max(1, len(found)), _GANG_CHARS // call.world_size)
        ranks = {rank: each.bounded(share) for rank, each in found.items()}
        ranks.update({rank: Found("its process has ended", "", "") for rank in call.ranks if here.has_ended(rank)})
        return {"id": self._id, "found": to_plain(NodeStacks(here.host, ranks))}
