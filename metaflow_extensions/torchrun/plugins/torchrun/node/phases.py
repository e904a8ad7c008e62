"""Where a node stands in a launch, and which way leads where. The picture of the docs is drawn from this table."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where a node stands in a launch."""

    BEGINNING = "the task has called run"
    PREPARING = "the commands of before_run run, or have failed"
    COMPLETING = "its task completes the request after them"
    READY = "it waits for the other nodes"
    STARTING = "its agent is being started"
    RUNNING = "its agent runs"
    STOPPING = "its workers have to stop, or its agent has failed"
    ENDED = "no worker is left, and the gang decides"
    STORING = "its task stores what the workers have left"
    OVER = "the launch is over here"


NEXT = {
    Phase.BEGINNING: {Phase.PREPARING, Phase.READY, Phase.OVER},
    Phase.PREPARING: {Phase.COMPLETING, Phase.OVER},
    Phase.COMPLETING: {Phase.READY, Phase.OVER},
    Phase.READY: {Phase.STARTING, Phase.OVER},
    Phase.STARTING: {Phase.RUNNING, Phase.ENDED},
    Phase.RUNNING: {Phase.STOPPING, Phase.ENDED},
    Phase.STOPPING: {Phase.ENDED},
    Phase.ENDED: {Phase.STARTING, Phase.STORING, Phase.OVER},
    Phase.STORING: {Phase.STORING, Phase.ENDED, Phase.OVER},
    Phase.OVER: set[Phase](),
}
LIVING = frozenset({Phase.STARTING, Phase.RUNNING, Phase.STOPPING})
"""The phases in which there may be processes of a generation."""
