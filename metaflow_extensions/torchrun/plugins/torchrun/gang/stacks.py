"""What every rank does now: for ``python flow.py torchrun stacks``, and where a launch hangs. Pure.

The clock of ``hang_timeout_s`` begins with the first sign of life of any rank. Before it, workers import, which takes
minutes on a busy machine; that time has a limit of its own. Ranks that wait for who reads their output do not hang; the
gang's page says that they wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..machine.frames import Found, look_first
from ..texts import names
from .collectives import Calls, compare
from .limits import START_S
from .questions import LATE, NO_WORKERS, Question
from .wire import to_plain

_SIGNS = "wrote anything, reported a step, joined a process group or exited"
_MAX_LINES = 64
_MAX_CHARS = 100_000  # of the stacks in the view, which is stored again and again
_NOBODY = "No worker was running on any node that has answered; torchrun was starting them, or waiting for their ends."


@dataclass(frozen=True)
class NodeStacks:
    """The workers of one node."""

    host: str
    ranks: dict[int, Found]  # by global rank; long texts are shortened
    calls: list[Calls] = field(default_factory=list)  # of collectives
    silent: dict[int, str] = field(default_factory=dict)  # rank -> why its recorder of collectives has told nothing


@dataclass(frozen=True)
class GangStacks:
    """An answer: all that the nodes have sent in time."""

    launch: int | None = None  # None: no worker runs
    generation: int | None = None
    nodes: dict[int, NodeStacks] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)  # node -> why it has sent nothing
    collectives: list[str] = field(default_factory=list)  # sentences: who misses which

    @property
    def ranks(self) -> dict[int, Found]:
        """All workers, by global rank."""
        return {rank: found for node in self.nodes.values() for rank, found in sorted(node.ranks.items())}


def gathered(question: Question, num_nodes: int, spares: Collection[int]) -> GangStacks:
    """Return what the nodes have answered, and for the others why they have not."""
    if not question.nodes:
        return GangStacks()
    nodes: dict[int, NodeStacks] = {}
    missing: dict[int, str] = {}
    calls, silent = list[Calls](), dict[int, str]()
    for node in range(num_nodes):
        found = question.found.get(node, LATE if node in question.open else NO_WORKERS)
        if isinstance(found, NodeStacks):
            nodes[node] = NodeStacks(found.host, found.ranks)
            calls += found.calls
            silent.update(found.silent)
        else:
            missing[node] = "waits as a spare" if node in spares else found
    whole = GangStacks(*question.about, nodes, missing)
    return replace(whole, collectives=compare(calls, silent, whole.ranks))


# --- hangs ----------------------------------------------------------------------------------------


def alike(ranks: Mapping[int, Found]) -> list[tuple[list[int], Found]]:
    """Return each different stack once, with its ranks, that of most first. Without a stack, equal reasons are a group."""
    by_mark: dict[str, list[int]] = {}
    for rank, found in sorted(ranks.items()):
        by_mark.setdefault(found.mark or found.where, []).append(rank)
    # The same stack may come from several nodes, and only the first of each sends its text.
    return [
        (each, max((ranks[rank] for rank in each), key=lambda found: len(found.text)))
        for each in sorted(by_mark.values(), key=lambda each: -len(each))
    ]


def hang(silent_s: float, timeout_s: float | None, has_begun: bool) -> tuple[str, str] | None:
    """Return why a launch hangs, and what to change, if all ranks were silent for too long.

    `has_begun` tells whether any rank has shown a sign of life; before it, the time counts from the start.
    """
    if timeout_s is None:
        return None
    limit_s = timeout_s if has_begun else max(timeout_s, START_S)
    if silent_s <= limit_s:
        return None
    text = f"no rank {_SIGNS} for {limit_s:g} s{'' if has_begun else ' after the start'}"
    return text, f"If they were only slow, set hang_timeout_s above {limit_s:g}."


def conclude(stacks: GangStacks, well: Collection[int]) -> tuple[str, dict[str, Any]]:
    """Return where the ranks are in a hang and which to look at first, and the same with all stacks for the view.

    The ranks of the nodes in `well` have ended well.
    """
    ranks, silent = stacks.ranks, sorted(node for node, why in stacks.missing.items() if why != NO_WORKERS)
    groups = alike(ranks)
    is_known = not silent and any(found.mark for _, found in groups)
    first, why = look_first(ranks) if is_known and not stacks.collectives else ([], "")
    share = _MAX_CHARS // max(1, len(groups))
    kept = [{"ranks": its, **to_plain(found.bounded(share))} for its, found in groups[:_MAX_LINES]]
    record = {"launch": stacks.launch, "first": first, "why": why, "stacks": kept}
    said = [] if groups else [_NOBODY]
    if well:
        said.append(f"The ranks of {names(sorted(well))} had ended well: do all ranks make the same number of steps?")
    if silent:
        said.append(f"No answer came from {names(silent)}: look there first.")
    elif first:
        said.append(f"Look at {names(first, 'rank')} first: {why}.")
    at: dict[str, list[int]] = {}
    for its, found in groups:
        at.setdefault(f"{found.where}: {found.line}" if found.line else found.where, []).extend(its)
    places = [f"{names(numbers, 'Rank')}: {place}" for place, numbers in at.items()]
    more = [f"{len(places) - _MAX_LINES} more such lines are left out."] if len(places) > _MAX_LINES else []
    return "\n".join([*stacks.collectives, *filter(None, [" ".join(said)]), *places[:_MAX_LINES], *more]), record
