"""Makes the result of `run` after a launch that has ended well on all nodes."""

from __future__ import annotations

from typing import Any

from ..errors import LaunchFailed
from ..events import Event
from ..gang.cause import Cause, FailureText, failed
from ..gang.group import Group
from ..gang.messages import Verdict
from ..gang.view import as_dicts
from ..launch.call import Call, Outcome
from ..launch.transfer import TransferFailed
from ..result import TorchrunResult
from .member import Member
from .services import Services


def result_of(outcome: Outcome, call: Call, member: Member, services: Services) -> TorchrunResult[Any]:
    """Return the result on this node. Raises LaunchFailed where a part can't be loaded."""
    verdict, fields = outcome.verdict, _fields(outcome.verdict, member, services)
    return TorchrunResult(
        launch=verdict.launch,
        num_nodes=call.num_nodes,
        node_index=call.node_index,
        nodes=(call.group or Group(call.num_nodes)).nodes,
        nproc_per_node=call.nproc,
        world_size=call.world_size,
        command=outcome.command,
        restarts=list(outcome.restarts),
        duration_s=outcome.duration_s,
        exit_codes=dict(sorted(outcome.exit_codes.items())),
        events=tuple(as_dicts(verdict.events)),
        has_values="values" in fields,
        **fields,
    )


def _fields(verdict: Verdict, member: Member, services: Services) -> dict[str, Any]:
    def say(line: str) -> None:
        member.say(Event("note", member.node, line))

    try:
        return services.result(verdict.left, say)
    except TransferFailed as error:
        cause = Cause("store", member.node, member.host, exception=f"has no result: {error}")
        after = f"\nThe workers of launch {verdict.launch} had ended well on all nodes."
        told = failed(LaunchFailed, FailureText(cause, after=after))
        told.events = as_dicts(verdict.events)
        services.failed(told, verdict.left)
        raise told from error
