"""The feature that names a closed ``master_port``: which node can't reach torch's store on the control node, and why.

torch (2.13) tries for 15 minutes, and then names neither that node nor the port. On the control node the watcher sees
that the store listens. If no worker has started `_PATIENCE_S` later, it tells the keeper, which asks all nodes. Each
node whose workers have not started tries to connect, and tells if it can't. Then the keeper asks once more, since
the network may have been mended meanwhile. A node that fails twice is the cause.

A launch that starts in time makes no connection and sends no message for this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from ...gang.messages import CONTROL
from ...gang.reach import Unreached
from ...gang.wire import Plain, to_plain
from ...machine.aside import Aside
from ...machine.looks import is_due
from ...machine.network import is_listened_on, try_to_connect
from ...machine.processes import living_descendants
from ...node.watchers import Here, Watch, Watcher

# From when the store listens until the nodes are asked. On a local run all workers start within a second; a node whose
# torch is imported from a cold disk comes much later, and reaches the store when it is asked.
_PATIENCE_S = 10.0
# Within this time the kernel sends a lost SYN three times: at once, and after 1 and 3 s.
_TRY_S = 5.0
_LOOK_S = 1.0  # between two looks for the store; a longer pause counts as one: this process was stopped meanwhile


class ReachWatch(Watch):
    """Finds out why a launch does not begin: whether all nodes can reach torch's store."""

    def watcher(self, here: Here) -> Watcher:
        """Return what looks for the store, and tries to reach it; a gang of one reaches its own."""
        return ReachWatcher(here) if here.request.spec.num_nodes > 1 else Watcher()


class ReachWatcher(Watcher):
    """Looks until the workers of this node have started."""

    def __init__(self, here: Here, clock: Callable[[], float] = time.monotonic) -> None:
        self._here, self._clock = here, clock
        self._has_begun = False
        self._waiting_s: float | None = None  # since when the store listens; None where nobody waits for that
        self._looked_at = float("-inf")
        self._number = 0  # of the question that is tried
        self._names = Aside("torchrun-names")
        self._attempt: Future[str] | None = None
        self._next: int | None = None  # the question that came meanwhile
        if here.request.spec.node_index == CONTROL:
            self._waiting_s = 0.0

    def poll(self) -> Plain | None:
        """Return that the launch waits, or that this node can't reach the store."""
        here = self._here
        self._has_begun = self._has_begun or bool(here.running()) or here.active_at() is not None
        if self._has_begun:
            self.close()
            return None
        now = self._clock()
        return self._try() or self._look(now)

    def asked(self, data: Plain) -> None:
        """Try to connect; a question that comes meanwhile is the next."""
        self._next = int(data["number"])

    def close(self) -> None:
        """Give up what is tried."""
        self._next = self._waiting_s = self._attempt = None

    def _try(self) -> Plain | None:
        address, port = self._here.request.main_addr, self._here.port
        if self._attempt is None and self._next is not None:
            self._number, self._next = self._next, None
            self._attempt = self._names.begin(try_to_connect, address, port, _TRY_S)
        if self._attempt is None or not self._attempt.done():
            return None
        why, self._attempt = self._attempt.result(), None
        told: Plain = to_plain(Unreached(self._number, address, port, why))
        return told if why else None

    def _look(self, now: float) -> Plain | None:
        """Return that the store has listened for long, once."""
        pause_s = now - self._looked_at
        if self._waiting_s is None or not is_due(_LOOK_S - pause_s):
            return None
        self._looked_at = now
        if not self._store_listens():
            self._waiting_s = 0.0
            return None
        self._waiting_s += min(pause_s, _LOOK_S)
        if self._waiting_s <= _PATIENCE_S:
            return None
        self._waiting_s = None
        return {"waits": True}

    def _store_listens(self) -> bool:
        agent = self._here.pid()
        # A stranger who has taken the port is none of ours: then the agent ends, and the gang takes another port.
        return agent is not None and is_listened_on(self._here.port, lambda: [agent, *living_descendants(agent)])


PART = ReachWatch()
