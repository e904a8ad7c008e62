"""What follows when all nodes have ended a launch, or their time is up. Pure."""

from __future__ import annotations

import enum
import re

from .cause import Cause
from .launch import Launch
from .protocol import CONTROL

BACKOFF_LIMIT_S = 30.0
"""The longest pause before a restart."""
# What an agent says when its store can't listen (TCPStore, torch 2.13).
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_MAX_MOVES = 3


class Next(enum.Enum):
    """What is done next."""

    FINISH = "the launch has ended well"
    MOVE = "all workers start again at once, with another port"
    RESTART = "all workers start again after a pause"
    FAIL = "the launch has failed"


def decide(launch: Launch, cause: Cause | None, silent: list[int], is_whole: bool, now: float) -> Next:
    """Return what follows.

    `cause` is what failed first; `silent` nodes have not said that they ended; a gang `is_whole` while all its nodes
    are members.
    """
    all_well = all(ended.ok for node, ended in launch.ended.items() if node not in launch.dropped)
    if (cause is None or launch.dropped) and not silent and all_well:
        return Next.FINISH
    # A node that has given the launch up by itself does not listen to it.
    can_start_again = is_whole and not launch.given_up and launch.preempted is None
    if cause is None or silent or not can_start_again:
        return Next.FAIL
    if _may_move(launch, cause):
        return Next.MOVE
    return Next.RESTART if _may_restart(launch, cause, now) else Next.FAIL


def _may_move(launch: Launch, cause: Cause) -> bool:
    """Tell whether somebody took the chosen port before the agent did, and another may be chosen."""
    taken = cause.kind == "agent" and _PORT_TAKEN.search(cause.detail) is not None
    return taken and launch.ready[CONTROL].master_port is None and launch.moves < _MAX_MOVES


def _may_restart(launch: Launch, cause: Cause, now: float) -> bool:
    policy = launch.policy
    over = cause.kind == "step_timeout" or now >= launch.deadline  # as one node's clock has it
    return cause.category in policy.restart_on and launch.restarts < policy.max_restarts and not over
