"""Decides, on the control node, that a launch hangs.

The clock of ``hang_timeout_s`` begins with the first sign of life of any rank. Before it, workers import, which takes
minutes on a busy machine; that time has a limit of its own. Ranks that wait for who reads their output do not hang; the
gang's page says that they wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ...gang.keepers import Failing, Happened, Keeper, Plain, Remarks, Where
from ...gang.messages import Report
from ...gang.texts import names
from ...gang.wire import from_plain, to_plain
from ...machine.frames import Found, look_first
from .told import DIAGNOSTICS_S, KIND, Diagnostics, Group, groups

_LATE_S = 3.0  # between two looks at the clock, which come every second
# The workers of a launch may take this long until the first sign of life: to be started, and to import PyTorch.
_START_S = 600.0
_SIGNS = "wrote anything, reported a step, joined a process group or exited"
_MAX_LINES = 64
_WAITS = " waits for its reader, such as a stopped terminal, and its ranks wait, too"
_NO_WORKERS = (
    "No worker was running on any node that has answered; torchrun was starting them, or waiting for their ends."
)
_GOES_ON = " is read again"
_MAX_PLACES = 4  # in the sentence that concludes
_MAX_CHARS = 100_000  # of the stacks in the record, which is stored again and again; the files have all


class HangKeeper(Keeper):
    """Fails a launch whose ranks are all silent for too long."""

    @classmethod
    def of(cls, num_nodes: int) -> Keeper:
        """Return what looks after all nodes."""
        return cls(num_nodes)

    def __init__(self, num_nodes: int = 1) -> None:
        self._num_nodes = num_nodes
        self._expected: set[int] = set()  # nodes whose workers ran when the launch was found to hang
        self._hangs = False
        self._timeout_s: float | None = None
        self._active_at = self._ticked_at = 0.0
        self._has_begun = False  # whether a rank has shown a sign of life
        self._found: dict[int, Diagnostics] = {}  # by node
        self._launch = 0
        self._has_news = False  # whether `_found` has more than `_record`
        self._record: Plain | None = None  # of the last hang
        self._done: set[int] = set()  # nodes whose ranks had ended well before

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Start the clock, if the launch has a limit."""
        self._timeout_s = policy.get("timeout_s")
        self._active_at = self._ticked_at = at_s
        self._has_begun = False
        if (record := self.record()) is not None:
            self._record = {**record, "is_last": False}
        self._found, self._launch = {}, launch
        self._expected, self._hangs, self._done = set(range(self._num_nodes)), False, set()

    def handle(self, node: int, told: Report, at_s: float) -> Remarks | None:
        """Keep when a worker was last active, or where the workers of a hang were."""
        if "waits" in told.data:
            whose = "the output" if self._num_nodes == 1 else f"node {node}: its output"
            return Remarks(happened=(Happened("told", node, whose + (_WAITS if told.data["waits"] else _GOES_ON)),))
        if "age_s" in told.data:
            self._active_at = max(self._active_at, at_s - told.data["age_s"])
            self._has_begun = True
        else:
            self._found[node] = from_plain(Diagnostics, told.data, "hangs")
            self._has_news = True
        return None

    def ended(self, node: int, ok: bool) -> None:
        """Expect nothing of a node whose workers had ended before; one without workers "ends" at once."""
        if not self._hangs:
            self._expected.discard(node)
            self._done |= {node} if ok and self._has_begun else set()

    def gone(self, node: int) -> None:
        """Expect nothing of a node that was no longer in the gang before."""
        if not self._hangs:
            self._expected.discard(node)

    def record(self) -> Plain | None:
        """Return where the ranks were in the last hang, if there was one."""
        if self._has_news:  # made for all nodes at once: of thousands it takes a second
            self._record, self._has_news = self._as_record(), False
        return self._record

    def tick(self, at_s: float, where: Callable[[int], Where]) -> Remarks:
        """Let the launch fail if all ranks were silent for too long."""
        limit_s, late_s = self._timeout_s, at_s - self._ticked_at
        self._ticked_at = at_s
        if late_s > _LATE_S:  # this process was stopped, perhaps with all others
            self._active_at = min(at_s, self._active_at + late_s)
        if limit_s is None:
            return Remarks()
        if not self._has_begun:
            limit_s = max(limit_s, _START_S)
        if at_s - self._active_at <= limit_s:
            return Remarks()
        self._hangs = True
        text, advice = f"no rank {_SIGNS} for {limit_s:g} s", "If they were only slow, raise hang_timeout_s."
        if not self._has_begun:
            text, advice = f"{text} after the start", f"If they start so slowly, set hang_timeout_s above {limit_s:g}."
        return Remarks(failing=Failing(KIND, text, advice=advice))

    def find_out_s(self, kind: str) -> float:
        """Return how many seconds the nodes may take to collect stacks."""
        return DIAGNOSTICS_S if kind == KIND else 0.0

    def detail(self, kind: str) -> str:
        """Return the place of every rank in the hang, and the files with the stacks."""
        if kind != KIND or not self._found:
            return ""
        found = sorted(self._found.items())
        alike = groups(self._ranks)
        having = [(node, each) for node, each in found if each.file is not None]
        of = {node: "" if self._num_nodes == 1 else f" of node {node} (host {each.host})" for node, each in having}
        files = [f"Whole stacks{of[node]}: {each.file}" for node, each in having]
        return "\n".join([self._conclusion(alike), *_first(_places(alike)), *_first(files)])

    @property
    def _ranks(self) -> dict[int, Found]:
        return {rank: found for node in self._found.values() for rank, found in node.ranks.items()}

    @property
    def _silent(self) -> list[int]:
        """The nodes that have not answered."""
        return sorted(self._expected - self._found.keys())

    def _conclusion(self, alike: list[Group]) -> str:
        """Return in one line where the ranks were, and which of them to look at first."""
        said = [_conclusion(alike) if alike else _NO_WORKERS]
        if self._done:
            ranks = f"The ranks of {names(sorted(self._done))} had ended well"
            said.append(f"{ranks}: do all ranks make the same number of steps?")
        first, why = look_first(self._ranks) if any(group.found.mark for group in alike) else ([], "")
        if silent := self._silent:
            verb = "has" if len(silent) == 1 else "have"
            said.append(f"{names(silent).capitalize()} {verb} not answered: look there first.")
        elif first:
            said.append(f"Look at {names(first, 'rank')} first: {why}.")
        return " ".join(said)

    def _as_record(self) -> Plain:
        first, why = ([], "") if self._silent else look_first(self._ranks)
        alike = groups(self._ranks)
        share = _MAX_CHARS // max(1, len(alike))
        stacks = [{"ranks": list(each.ranks), **to_plain(each.found.bounded(share))} for each in alike[:_MAX_LINES]]
        return {"launch": self._launch, "first": first, "why": why, "is_last": True, "stacks": stacks}


_FRAME = re.compile(r"(?P<at>.+?:(?:\d+|\?+)) in (?P<function>[^()]+?)(?: \((?P<inner>in .+)\))?")


def _conclusion(alike: list[Group]) -> str:
    """Return one sentence with the ranks' places, grouped by place: "rank 3 in load at data.py:18"."""
    at: dict[str, list[int]] = {}
    for group in alike:
        match = _FRAME.fullmatch(group.found.where)
        place = (
            f"{match['inner'] or 'in ' + match['function']} at {match['at']}" if match else f"with {group.found.where}"
        )
        at.setdefault(place, []).extend(group.ranks)
    most_first = sorted(at.items(), key=lambda each: -len(each[1]))
    told = [
        f"{names(ranks, 'rank') if len(ranks) == 1 else f'{len(ranks)} ranks'} {text}" for text, ranks in most_first
    ]
    more = len(told) - _MAX_PLACES
    return ", ".join([*told[:_MAX_PLACES], *([f"and {more} more places"] if more > 0 else [])]) + "."


def _places(alike: list[Group]) -> list[str]:
    """Return a line for each place, with its source line."""
    at: dict[str, list[int]] = {}
    for group in alike:
        line = f": {group.found.line}" if group.found.line else ""
        at.setdefault(f"{group.found.where}{line}", []).extend(group.ranks)
    return [f"{names(ranks, 'Rank')}: {place}" for place, ranks in at.items()]


def _first(lines: list[str]) -> list[str]:
    """Return the first lines, and the number of those left out."""
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], f"{more} more such lines are left out."] if more > 0 else lines


PART = HangKeeper
