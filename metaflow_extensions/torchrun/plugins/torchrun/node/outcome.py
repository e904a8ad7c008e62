"""Makes the result of `run` after a launch that has ended well on all nodes."""

from __future__ import annotations

import shlex
from typing import Any

from ..errors import LaunchFailed
from ..events import Event
from ..gang.cause import Cause, FailureText, failed
from ..gang.member import Member
from ..gang.protocol import Verdict
from ..launch.transfer import TransferFailed
from ..result import TorchrunResult
from .generation import Generation
from .plan import Plan
from .watchers import results_of


def result_of(
    plan: Plan,
    member: Member,
    verdict: Verdict,
    generation: Generation,
    restarts: list[dict[str, Any]],
    duration_s: float,
) -> TorchrunResult[Any]:
    """Return the result on this node; `generation` is the last one. Raises LaunchFailed where a part can't be loaded."""
    spec, fields = plan.spec, _fields(plan, member, verdict)
    return TorchrunResult(
        launch=verdict.launch,
        num_nodes=spec.num_nodes,
        node_index=spec.node_index,
        nproc_per_node=spec.nproc,
        world_size=spec.world_size,
        command=shlex.join(generation.command),
        restarts=restarts,
        duration_s=duration_s,
        exit_codes=dict(sorted(generation.exits.codes.items())),
        events=tuple(event.as_dict() for event in verdict.events),
        **fields,
    )


def _fields(plan: Plan, member: Member, verdict: Verdict) -> dict[str, Any]:
    def say(line: str, is_detail: bool = False) -> None:
        member.emit(Event("note", member.node, line, is_detail))

    more = results_of(plan.features, verdict.features, lambda line: say(line, is_detail=True))
    try:
        return {**more, **plan.services.result(verdict.features, say)}
    except TransferFailed as error:
        cause = Cause("store", member.node, member.host, exception=f"has no result: {error}")
        after = f"\nThe workers of launch {verdict.launch} had ended well on all nodes."
        told = failed(LaunchFailed, FailureText(cause, after=after))
        told.events = [event.as_dict() for event in verdict.events]
        plan.services.failed(told, verdict.features)
        raise told from error
