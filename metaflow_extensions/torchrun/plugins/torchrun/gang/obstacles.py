"""The errors for launches that can't begin, and for failures while no launch runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import GangError, GangStartTimeout, LaunchFailed, TorchrunError, TorchrunPreempted
from .cause import Cause, FailureText, failed
from .launch import error_of
from .protocol import Join
from .texts import names

MOST_VERDICTS = 1000  # of so many launches, the last ones, they are kept for tasks that take the place of others


def missing(absent: Sequence[int], num_nodes: int, waited_s: float, command: str = "") -> GangStartTimeout:
    """Return the error for nodes that did not come in time; `command` shows why the first did not, or is empty."""
    return GangStartTimeout(
        f"Waited {waited_s:g} s, but {names(absent)} of {num_nodes} did not arrive. Look at the logs of these tasks: "
        "they may wait for machines, fail to pull their image, or not reach the control node. "
        f"@torchrun(all_nodes_started_timeout=...) changes how long to wait.{to_see_why(absent[0], command)}"
    )


def to_see_why(node: int, command: str) -> str:
    """Return the sentence with the command that shows why a node is missing; empty without a command."""
    return f" To see why node {node} is missing: {command}" if command else ""


def step_has_ended(number: int, gone: Sequence[int]) -> GangError:
    """Return the error for a launch that some nodes will never call."""
    return GangError(
        f"Launch {number} can't begin: the step's code has already ended on {names(gone)}. Every node must call "
        "current.torch.run the same number of times."
    )


def port_taken(port: int | None, host: str) -> GangError:
    """Return the error for a pinned port that another program uses."""
    return GangError(
        f"Port {port} is taken on the control node (host {host}). Pin another with master_port, or leave it out: the "
        "kernel then chooses a free one."
    )


def commands_failed(cause: Cause, then: str = "", is_alone: bool = False) -> TorchrunError:
    """Return the error for a node whose commands of before_run have failed; `then` says what follows, if others go on."""
    nowhere = f"before_run failed, so no worker was started{'' if is_alone else ' on any node'}.\n"
    before = f"before_run failed. {then}\n" if then else nowhere
    return failed(LaunchFailed, FailureText(cause, before=before))


def too_early(cause: Cause, number: int, more: str = "") -> TorchrunError:
    """Return the error for a node that failed while others waited for it to call `run`; `more` stands at the end."""
    return error_of(cause, f"It happened before launch {number} began.{more}")


def outside(cause: Cause, after_step: bool, more: str = "", is_alone: bool = False) -> TorchrunError:
    """Return the error for a node that failed while no launch ran; `more` stands at the end."""
    place = "in the call of" if cause.kind == "call" else "outside of"
    when = "after the step's code, before its results were stored" if after_step else f"{place} current.torch.run"
    return error_of(cause, f"It happened {when}{'' if is_alone else '; the other nodes were stopped'}.{more}")


def silent(node: int, host: str, why: str) -> TorchrunError:
    """Return the error for a node that was silent for too long, for that node itself."""
    return error_of(
        Cause("lost", node, host, exception=why),
        "It was stopped, or its network was cut. The gang does not take it back.",
    )


def turned_away(join: Join, num_nodes: int, host: str | None) -> GangError:
    """Return the error for a task whose node index belongs to a task on `host`; None: the gang has no such index."""
    why = f"another task of this attempt has the same node index (host {host})"
    return GangError(f"{_turned_away(join)}: {why if host else f'there are {num_nodes} nodes in this gang'}.")


def too_late(join: Join) -> GangError:
    """Return the error for a task that came after `all_nodes_started_timeout`, where the others have begun without it."""
    return GangError(
        f"{_turned_away(join)}: it has not joined in time (all_nodes_started_timeout), and the others go on without it."
    )


def too_far_behind(number: int) -> GangError:
    """Return the error for a task that came in the place of another, and calls a launch whose end is forgotten."""
    return GangError(
        f"The end of launch {number} is not known any more: a task that takes the place of another can make up for "
        f"{MOST_VERDICTS} launches. Use fewer launches in one step."
    )


def no_replacement(join: Join, host: str, is_member: bool) -> TorchrunPreempted:
    """Return the error for a task that came in the place of another, which is on `host`."""
    before = f"still runs (host {host}), and all ranks may save" if is_member else f"has ended (host {host})"
    text = f"the task that it is to replace {before}. A gang takes no node twice. {TorchrunPreempted.remedy}"
    return TorchrunPreempted(f"{_turned_away(join)}: {text}")


def replaced(join: Join, host: str) -> TorchrunPreempted:
    """Return the error for a task in whose place a newer one has come, which is on `host`."""
    return TorchrunPreempted(f"{_turned_away(join)}: a newer task has taken its place (host {host}).")


def too_soon(join: Join, host: str) -> GangError:
    """Return the error for a task that came in the place of another, which is on `host`, before that had ended."""
    return GangError(f"the task before it, on host {host}, has not ended yet")


def _turned_away(join: Join) -> str:
    return f"Node {join.node} (host {join.host}) was turned away by the control node"
