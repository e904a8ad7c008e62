"""What a node tells of a launch that hangs, and what is kept of all nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...machine.frames import Found

KIND = "hang"  # of the cause
# The nodes may take this long to collect the stacks of their workers.
DIAGNOSTICS_S = 15.0


@dataclass(frozen=True)
class Diagnostics:
    """What one node's workers were doing when the launch hung."""

    host: str  # the node's host name
    file: str | None  # has all stacks; None if they could not be written
    ranks: dict[int, Found]  # by global rank; of equal stacks, only the first is whole


@dataclass(frozen=True)
class Group:
    """Ranks whose stacks are equal."""

    ranks: tuple[int, ...]
    found: Found


def groups(ranks: dict[int, Found]) -> list[Group]:
    """Return each different stack once, that of most ranks first. Without a stack, equal reasons are a group."""
    alike: dict[str, list[int]] = {}
    for rank, found in sorted(ranks.items()):
        alike.setdefault(found.mark or found.where, []).append(rank)
    having = sorted(alike.values(), key=lambda each: -len(each))
    # The same stack may come from several nodes, and only the first of each sends its text.
    return [
        Group(tuple(each), max((ranks[rank] for rank in each), key=lambda found: len(found.text))) for each in having
    ]
