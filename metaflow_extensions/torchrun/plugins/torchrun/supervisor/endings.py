"""What ends a node's launch from outside of it, and the errors for that."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import LaunchFailed, TorchrunError, TorchrunPreempted
from ..gang.cause import Cause, FailureText, failed
from ..gang.messages import CONTROL

# Each goes to the launch's inbox, like the gang's messages.


@dataclass(frozen=True)
class Broken:
    """The gang is broken, or the step's code has ended."""

    error: TorchrunError


@dataclass(frozen=True)
class MustEnd:
    """This node must end, as after a SIGTERM; `why` follows the words "node 1 was preempted: "."""

    why: str


@dataclass
class GivenUp(Exception):
    """The task has left the call of `run`, or has ended; `cause` is what the gang does not know yet."""

    cause: Cause | None


class NotNeeded(BaseException):
    """Ends the step's code on a node that took no part in a launch; no `except Exception` of a user stops it."""


def preempted(node: int, host: str, why: str) -> TorchrunPreempted:
    """Return the error for a task that was told to stop."""
    cause = Cause("terminated", node, host, exception=why)
    after = " If the gang ends by this, Metaflow's @retry starts a new one."
    return failed(TorchrunPreempted, FailureText(cause, after=after))


def lost_control(reason: str) -> TorchrunError:
    """Return the error for a node whose connection to the control node has ended, or is silent."""
    cause = Cause("lost", CONTROL, "the control node", exception=reason)
    failure = FailureText(
        cause,
        instead=f"Node {CONTROL} (the control node) is lost: {reason}. Without it the gang can't go on; see its log.",
    )
    return failed(LaunchFailed, failure)
