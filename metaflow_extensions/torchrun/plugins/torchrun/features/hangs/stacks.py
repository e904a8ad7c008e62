"""Collects the stacks of one node's workers in a hang, for the log and the gang."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import indent

from ...gang.hangs import alike
from ...gang.texts import names
from ...machine.frames import Found
from ...machine.stacks import Question

# Of the stacks that a node sends; JSON may double a text (`node.watchers.MAX_TOLD_BYTES`).
_MAX_CHARS = 200_000
_POLL_S = 0.05


@dataclass(frozen=True)
class Findings:
    """The stacks of the workers of one node."""

    text: str  # for the log: the user's own frames, equal ones once
    ranks: dict[int, Found]  # of equal stacks, only the first has its text; long ones lack their end


async def collect(workers: Mapping[int, int], within_s: float) -> Findings:
    """Collect the stacks of all workers at once; `workers` has a pid for each global rank. Their errors are not raised."""
    question = Question(workers, within_s)
    while (found := question.poll()) is None:
        await asyncio.sleep(_POLL_S)
    groups = alike(found)
    text = "\n".join(
        f"--- {names(group.ranks, 'rank')}: {group.found.where}\n{indent(group.found.short, '  ')}" for group in groups
    )
    return Findings(text, _each_once(found, _MAX_CHARS // max(1, len(groups))))


def _each_once(found: Mapping[int, Found], limit: int) -> dict[int, Found]:
    """Return the same, in which only the first of equal stacks has its text, of at most so many characters."""
    firsts = {group.ranks[0] for group in alike(dict(found))}
    return {
        rank: each.bounded(limit) if rank in firsts else replace(each, text="", line="", short="")
        for rank, each in found.items()
    }
