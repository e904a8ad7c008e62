"""The feature ``hang_timeout_s``: detects launches that hang, and collects the stacks of their workers.

The clock of ``hang_timeout_s`` begins with the first sign of life of any rank. Before it, workers import, which takes
minutes on a busy machine; that time has a limit of its own. Ranks that wait for who reads their output do not hang; the
gang's page says that they wait.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...gang.keepers import Failing, Happened, Keeper, Plain, Remarks, Where
from ...gang.protocol import Told
from ...gang.texts import names
from ...gang.wire import from_plain, to_plain
from ...launch.run_settings import RunSettings
from ...machine.network import is_connected_to
from ...machine.stacks import HOOK, hook_environment
from ...node.plan import Plan
from ...node.watchers import Feature, Here, Variables, Watcher
from .stacks import collect

_KIND = "hang"  # of the cause
# The nodes may take this long to collect the stacks of their workers.
_DIAGNOSTICS_S = 15.0
# A node reports output to the control node at most once in this fraction of hang_timeout_s.
_ACTIVE_PART = 0.1
_LATE_S = 3.0  # between two looks at the clock, which come every second
# The workers of a launch may take this long until the first sign of life: to be started, and to import PyTorch.
_START_S = 600.0
_SIGNS = "wrote anything, told a step, joined a process group or exited"
# How often a node looks whether a worker has begun to join a process group: of the time since the start, and at least.
_LOOK_PART, _LOOK_S = 0.1, 1.0
_TELL_S = (
    60.0  # from the last news of a reader until a wait is told: where many nodes share it, each waits now and then
)
_MAX_LINES = 64
_WAITS = "node {}: its output waits for its reader, such as a stopped terminal, and its ranks wait, too"
_NO_WORKERS = (
    "No worker was running on any node that has answered; torchrun was starting them, or waiting for their ends."
)
_GOES_ON = "node {}: its output is read again"
_MAX_PLACES = 4  # in the sentence that concludes


class Hangs(Feature):
    """Fails a launch whose ranks are all silent for too long, and stores their stacks."""

    name = "hangs"

    def policy(self, run: RunSettings) -> Plain:
        """Return the limit, if there is one."""
        return {} if run.hang_timeout_s is None else {"timeout_s": run.hang_timeout_s}

    def keeper(self, num_nodes: int) -> Keeper | None:
        """Return the keeper that decides that a launch hangs; only the control node has one."""
        return HangKeeper()

    def variables(self, plan: Plan, folder: str) -> Variables:
        """Return the variables that let workers write their stacks on request."""
        if limit_s(plan) is None:
            return Variables()
        return Variables(hook_environment(), hooks=(HOOK,))

    def watcher(self, here: Here) -> Watcher:
        """Return the watcher that reports activity of workers."""
        return HangWatcher(here, limit_s(here.plan))


def limit_s(plan: Plan) -> float | None:
    """Return how many seconds all ranks of a launch may be silent; None means no limit."""
    found: float | None = plan.policy.features.get(Hangs.name, {}).get("timeout_s")
    return found


@dataclass(frozen=True)
class Diagnostics:
    """The places in the code of one node's workers when the launch hung."""

    host: str  # the node's host name
    file: str | None  # has all stacks; None if they could not be written
    where: dict[int, str]  # global rank -> its place in the code, in one line


# --- on each node -----------------------------------------------------------------------------


class HangWatcher(Watcher):
    """Reports signs of life of this node's workers, and in a hang their places in the code."""

    def __init__(self, here: Here, timeout_s: float | None) -> None:
        self._here = here
        self._pause_s = None if timeout_s is None else timeout_s * _ACTIVE_PART
        self._said_at = float("-inf")
        self._began_at = self._looked_at = time.monotonic()
        self._is_held_up, self._told_at = False, float("-inf")

    def poll(self) -> Plain | None:
        """Return whether the workers wait for their reader, if that has changed, or how long ago a worker was active."""
        now = time.monotonic()
        is_due = self._is_held_up or now >= self._told_at + _TELL_S
        if self._here.is_held_up() is not self._is_held_up and is_due:
            self._told_at = now
            self._is_held_up = not self._is_held_up
            return {"waits": self._is_held_up}
        if self._pause_s is None:
            return None
        at = self._here.active_at() or self._joins_at()
        if at is None or at <= self._said_at + self._pause_s:
            return None
        self._said_at = at
        return {"age_s": time.monotonic() - at}

    def _joins_at(self) -> float | None:
        """Return the time if a worker joins a process group, for which it connects to torch's store."""
        now = time.monotonic()
        pause_s = max(_LOOK_S, (now - self._began_at) * _LOOK_PART)
        if self._said_at >= self._began_at or now - self._looked_at < pause_s:
            return None
        self._looked_at = now
        here = self._here
        return now if is_connected_to(here.port, here.running().values()) else None

    async def before_stop(self, kind: str) -> Plain | None:
        """Store the stacks of all workers if the launch hangs; return their places in the code."""
        if kind != _KIND:
            return None
        here = self._here
        workers = here.running()
        told = Diagnostics(here.host, None, {})
        if workers:
            found = await collect(workers, here.plan.spec.log_dir, here.name, _DIAGNOSTICS_S)
            here.show(f"what the workers were doing:\n{found.text}")
            told = Diagnostics(here.host, found.file, found.where)
        plain: Plain = to_plain(told)
        return plain


# --- on the control node ----------------------------------------------------------------------


class HangKeeper(Keeper):
    """Fails a launch whose ranks are all silent for too long."""

    has_record = False

    def __init__(self) -> None:
        self._timeout_s: float | None = None
        self._active_at = self._ticked_at = 0.0
        self._has_begun = False  # whether a rank has shown a sign of life
        self._found: dict[int, Diagnostics] = {}  # by node

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Start the clock, if the launch has a limit."""
        self._timeout_s = policy.get("timeout_s")
        self._active_at = self._ticked_at = at_s
        self._has_begun = False
        self._found = {}

    def handle(self, node: int, told: Told, at_s: float) -> Remarks | None:
        """Keep when a worker was last active, or where the workers of a hang were."""
        if "waits" in told.data:
            text = _WAITS if told.data["waits"] else _GOES_ON
            return Remarks(happened=(Happened("told", node, text.format(node)),))
        if "age_s" in told.data:
            self._active_at = max(self._active_at, at_s - told.data["age_s"])
            self._has_begun = True
        else:
            self._found[node] = from_plain(Diagnostics, told.data, "hangs")
        return None

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
        text, advice = f"no rank {_SIGNS} for {limit_s:g} s", "If they were only slow, raise hang_timeout_s."
        if not self._has_begun:
            text, advice = f"{text} after the start", f"If they start so slowly, set hang_timeout_s above {limit_s:g}."
        return Remarks(failing=Failing(_KIND, text, advice=advice))

    def find_out_s(self, kind: str) -> float:
        """Return how many seconds the nodes may take to collect stacks."""
        return _DIAGNOSTICS_S if kind == _KIND else 0.0

    def detail(self, kind: str) -> str:
        """Return the place of every rank in the hang, and the files with the stacks."""
        if kind != _KIND or not self._found:
            return ""
        found = sorted(self._found.items())
        where = sorted((rank, place) for _, each in found for rank, place in each.where.items())
        having = [(node, each) for node, each in found if each.where]
        files = [f"Stacks of node {node} (host {each.host}): {each.file or 'in its log only'}" for node, each in having]
        return "\n".join([conclusion(where) if where else _NO_WORKERS, *_first(_places(where)), *_first(files)])


_FRAME = re.compile(r"(?P<at>\S+:\d+) in (?P<function>[^()]+?)(?: \((?P<inner>in .+)\))?")


def conclusion(where: list[tuple[int, str]]) -> str:
    """Return one sentence with the ranks' places, grouped by place: "rank 3 in load at data.py:18"."""
    at: dict[str, list[int]] = {}
    for rank, place in where:
        match = _FRAME.fullmatch(place)
        text = f"{match['inner'] or 'in ' + match['function']} at {match['at']}" if match else f"unknown ({place})"
        at.setdefault(text, []).append(rank)
    most_first = sorted(at.items(), key=lambda each: -len(each[1]))
    told = [
        f"{names(ranks, 'rank') if len(ranks) == 1 else f'{len(ranks)} ranks'} {text}" for text, ranks in most_first
    ]
    more = len(told) - _MAX_PLACES
    return ", ".join([*told[:_MAX_PLACES], *([f"and {more} more places"] if more > 0 else [])]) + "."


def _places(where: list[tuple[int, str]]) -> list[str]:
    """Return a line for each rank with its place; if there are many ranks, a line for each place."""
    if len(where) <= _MAX_LINES:
        return [f"Rank {rank} was at {place}." for rank, place in where]
    at: dict[str, list[int]] = {}
    for rank, place in where:
        at.setdefault(place, []).append(rank)
    return [f"{names(at[place], 'Rank')} {'was' if len(at[place]) == 1 else 'were'} at {place}." for place in at]


def _first(lines: list[str]) -> list[str]:
    """Return the first lines, and the number of those left out."""
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], f"{more} more such lines are left out."] if more > 0 else lines
