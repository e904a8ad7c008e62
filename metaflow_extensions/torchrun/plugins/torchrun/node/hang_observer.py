"""Reports signs of life of a node's workers, and in a hang their places in the code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from textwrap import indent

from ..gang.hangs import KIND, Diagnostics, alike
from ..gang.limits import DIAGNOSTICS_S
from ..gang.texts import names
from ..gang.wire import Plain, to_plain
from ..machine.frames import Found, without_stack
from ..machine.looks import is_due
from ..machine.network import is_connected_to
from ..machine.stacks import Question
from .observers import Here, Observer

# The workers' part of `DIAGNOSTICS_S`; their source lines are read after it.
_WORKERS_S = DIAGNOSTICS_S - 4.0
# A node reports output to the control node at most once in this fraction of hang_timeout_s.
_ACTIVE_PART = 0.1
# How often a node looks whether a worker has begun to join a process group: of the time since the start, and at least.
_LOOK_PART, _LOOK_S = 0.1, 1.0
_TELL_S = (
    60.0  # from the last news of a reader until a wait is told: where many nodes share it, each waits now and then
)
_MAX_CHARS = 200_000  # of the stacks that a node sends in one message; JSON may double a text
_POLL_S = 0.05


class HangObserver(Observer):
    """Reports signs of life of this node's workers, and in a hang their places in the code."""

    def __init__(self, here: Here) -> None:
        self._here = here
        timeout_s = here.call.policy.hang_timeout_s  # without one, only a reader that is waited for is told
        self._pause_s = None if timeout_s is None else timeout_s * _ACTIVE_PART
        self._said_at = float("-inf")
        self._began_at = self._looked_at = time.monotonic()
        self._is_held_up, self._told_at = False, float("-inf")

    def poll(self) -> Plain | None:
        """Return whether the workers wait for their reader, if that has changed, or how long ago a worker was active."""
        now = time.monotonic()
        is_due = self._is_held_up or now >= self._told_at + _TELL_S
        if self._here.is_held_up() is not self._is_held_up and is_due:
            self._told_at = now
            self._is_held_up = not self._is_held_up
            return {"waits": self._is_held_up}
        if self._pause_s is None:
            return None
        at = self._here.active_at() or self._joins_at()
        if at is None or at <= self._said_at + self._pause_s:
            return None
        self._said_at = at
        return {"age_s": time.monotonic() - at}

    def _joins_at(self) -> float | None:
        """Return the time if a worker joins a process group, for which it connects to torch's store."""
        now = time.monotonic()
        pause_s = max(_LOOK_S, (now - self._began_at) * _LOOK_PART)
        if self._said_at >= self._began_at or not is_due(self._looked_at + pause_s - now):
            return None
        self._looked_at = now
        here = self._here
        return now if is_connected_to(here.go.port, here.running().values()) else None

    async def before_stop(self, kind: str) -> Plain | None:
        """Log the stacks of all workers if the launch hangs; return them."""
        if kind != KIND:
            return None
        here = self._here
        workers, ranks = here.running(), dict[int, Found]()
        if workers:
            text, ranks = await collect(workers, _WORKERS_S)
            here.show(f"what the workers were doing:\n{text}")
        has_ended = [rank for rank in here.call.ranks if here.has_ended(rank)]
        ranks = {**ranks, **dict.fromkeys(has_ended, without_stack("the process has ended"))}
        plain: Plain = to_plain(Diagnostics(ranks))
        return plain


async def collect(workers: Mapping[int, int], within_s: float) -> tuple[str, dict[int, Found]]:
    """Return the stacks of all workers, given as rank -> pid: the user's own frames as a text, and by rank.

    Of equal stacks only the first has its text; long ones lack their end.
    """
    question = Question(workers, within_s)
    while (found := question.poll()) is None:
        await asyncio.sleep(_POLL_S)
    groups = alike(found)
    firsts, most = {group.ranks[0] for group in groups}, _MAX_CHARS // max(1, len(groups))
    text = "\n".join(
        f"--- {names(group.ranks, 'rank')}: {group.found.where}\n{indent(group.found.short, '  ')}" for group in groups
    )
    return text, {
        rank: each.bounded(most) if rank in firsts else replace(each, text="", line="", short="")
        for rank, each in found.items()
    }
