"""Where a node stands, as it knows itself: in its step, and towards the control node."""

from __future__ import annotations

import enum


class ControlNode(enum.IntEnum):
    """The state of the control node as this node knows it; it only moves down this list."""

    UNKNOWN = 0  # this node is no member yet
    HERE = 1
    ACKNOWLEDGED = 2  # it has read that this node leaves
    BYE = 3  # it has announced that it leaves
    GONE = 4  # the connection has ended


class State(enum.Enum):
    """Where the step's code is; this decides how news reaches it."""

    STEP = "joins, or is in code of its own: news interrupts it"
    LAUNCH = "in a launch: news goes to the supervisor"
    TOLD = "in code of its own, and has the gang's error already: only an order to end interrupts it"
    WAITING = "ended on the control node, which waits for the others: news interrupts it"
    ALONE = "ended on the control node, and all others have left: news still interrupts it, as how the last has left"
    STORING = "ended, on the control node after all others have left; its results are being stored"
    ENDING = "was ordered to end: the gang knows, and the code of the step has the error"
    LEFT = "this node has left"


NEXT = {
    State.STEP: {State.LAUNCH, State.TOLD, State.WAITING, State.STORING, State.ENDING, State.LEFT},
    State.LAUNCH: {State.STEP, State.TOLD, State.LEFT},
    State.TOLD: {State.LAUNCH, State.TOLD, State.WAITING, State.STORING, State.ENDING, State.LEFT},
    State.WAITING: {State.TOLD, State.ALONE, State.ENDING, State.LEFT},
    State.ALONE: {State.TOLD, State.STORING, State.ENDING, State.LEFT},
    State.STORING: {State.LEFT},
    State.ENDING: {State.LEFT},
    State.LEFT: set[State](),
}
OVER = frozenset({State.STORING, State.ENDING, State.LEFT})
