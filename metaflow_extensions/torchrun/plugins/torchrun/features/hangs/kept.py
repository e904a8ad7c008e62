"""Whether a launch hangs, as the control node sees it, and where its ranks were then. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...gang.keepers import Failing, Keeper, Plain, Remarks, Where
from ...gang.protocol import Told
from ...gang.texts import names
from ...gang.wire import from_plain

KIND = "hang"
"""Of the cause."""
DIAGNOSTICS_S = 15.0
"""How long the nodes may take to write down what the workers of a hang are doing."""
_MAX_LINES = 64


@dataclass(frozen=True)
class Active:
    """A worker of this node has written something or ended, `age_s` seconds ago."""

    age_s: float


@dataclass(frozen=True)
class Diagnostics:
    """What the workers of one node were doing when the launch hung."""

    host: str  # the node's host name
    file: str | None  # where all stacks are; None if they could not be written
    where: dict[int, str]  # global rank -> where in its code it was, in a line


class HangKeeper(Keeper):
    """Has a launch fail whose ranks are all silent for too long."""

    has_record = False

    def __init__(self) -> None:
        self._timeout_s: float | None = None
        self._active_at = 0.0
        self._found: dict[int, Diagnostics] = {}  # by node

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Begin to look at the clock, where the launch has such a limit."""
        self._timeout_s, self._active_at = policy.get("timeout_s"), at_s
        self._found = {}

    def handle(self, node: int, told: Told, at_s: float) -> None:
        """Keep when a worker has done something, or where it was when it did nothing."""
        if "age_s" in told.data:
            self._active_at = max(self._active_at, at_s - from_plain(Active, told.data, "hangs").age_s)
        else:
            self._found[node] = from_plain(Diagnostics, told.data, "hangs")

    def tick(self, at_s: float, where: Callable[[int], Where]) -> Remarks:
        """Have the launch fail if nothing has come for too long."""
        limit_s = self._timeout_s
        if limit_s is None or at_s - self._active_at <= limit_s:
            return Remarks()
        return Remarks(failing=Failing(KIND, f"no rank wrote anything or exited for {limit_s:g} s"))

    def find_out_s(self, kind: str) -> float:
        """Return how long the nodes may take to ask their workers."""
        return DIAGNOSTICS_S if kind == KIND else 0.0

    def detail(self, kind: str) -> str:
        """Return where every rank was when the launch hung, and where the stacks are."""
        if kind != KIND:
            return ""
        found = sorted(self._found.items())
        where = sorted((rank, place) for _, each in found for rank, place in each.where.items())
        files = [f"Stacks of node {node} (host {each.host}): {each.file or 'in its log only'}" for node, each in found]
        return "\n".join(first_lines(places(where)) + first_lines(files))


def places(where: list[tuple[int, str]]) -> list[str]:
    """Say where each rank was; of many, those at the same place together."""
    if len(where) <= _MAX_LINES:
        return [f"Rank {rank} was at {place}." for rank, place in where]
    at: dict[str, list[int]] = {}
    for rank, place in where:
        at.setdefault(place, []).append(rank)
    return [f"{names(at[place], 'Rank')} {'was' if len(at[place]) == 1 else 'were'} at {place}." for place in at]


def first_lines(lines: list[str]) -> list[str]:
    """Return the first of many lines, and how many are left out."""
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], f"{more} more such lines are left out."] if more > 0 else lines
