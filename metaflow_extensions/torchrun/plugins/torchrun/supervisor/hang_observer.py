"""Reports signs of life of a node's workers, and in a hang, or when a command asks, their places in the code and in
their collectives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from textwrap import indent

from ..gang.limits import WORKERS_S
from ..gang.questions import HANG
from ..gang.stacks import NodeStacks, alike
from ..gang.wire import Plain, to_plain
from ..machine.frames import Found, without_stack
from ..machine.network import is_connected_to
from ..machine.stacks import ask
from ..texts import names
from . import recorders
from .workers import Workers

# A node reports output to the control node at most once in this fraction of hang_timeout_s.
_ACTIVE_PART = 0.1
_LOOK_S = 2.0  # between two looks whether a worker has begun to join a process group
# Of the stacks in one message of a node, in which JSON may double a text, and in the answer of the whole gang, one file.
_NODE_CHARS, _GANG_CHARS = 200_000, 16_000_000


class HangObserver:
    """Reports signs of life of this node's workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        timeout_s = workers.call.policy.hang_timeout_s
        self._pause_s = None if timeout_s is None else timeout_s * _ACTIVE_PART
        self._sign_at = float("-inf")
        self._looked_at = time.monotonic()

    def poll(self) -> Plain | None:
        """Return how long ago a worker was active, if that has changed and there is a limit for it."""
        if self._pause_s is None:
            return None
        now, at = time.monotonic(), self._workers.last_sign_at
        if at is None and self._joins(now):
            at = now
        if at is None or at <= self._sign_at + self._pause_s:
            return None
        self._sign_at = at
        return {"age_s": now - at}

    def _joins(self, now: float) -> bool:
        """Return whether a worker has begun to join a process group, for which it connects to torch's store."""
        if self._sign_at > float("-inf") or now < self._looked_at + _LOOK_S:
            return False
        self._looked_at = now
        return is_connected_to(self._workers.go.port, self._workers.running().values())


async def stacks_of(workers: Workers, asked: str) -> Plain:
    """Return what the workers do now; in a hang the log has it, too."""
    found, (calls, silent) = await asyncio.gather(ask(workers.running(), WORKERS_S), recorders.ask(workers))
    if found and asked == HANG:
        workers.side.say("note", f"what the workers were doing:\n{text_of(found)}")
    plain: Plain = to_plain(NodeStacks(workers.side.host, _to_send(workers, found), calls, silent))
    return plain


def _to_send(workers: Workers, found: Mapping[int, Found]) -> dict[int, Found]:
    """Return the stacks, bounded, and that the other workers have ended."""
    share = min(_NODE_CHARS // max(1, len(found)), _GANG_CHARS // workers.call.world_size)
    ended = dict.fromkeys(workers.codes, without_stack("the process has ended"))
    return {**{rank: each.bounded(share) for rank, each in found.items()}, **ended}


def text_of(found: Mapping[int, Found]) -> str:
    """Return the user's own frames for the log, equal stacks once."""
    return "\n".join(
        f"--- {names(ranks, 'rank')}: {each.where}\n{indent(each.short, '  ')}" for ranks, each in alike(found)
    )
