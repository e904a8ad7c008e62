"""The feature ``hang_timeout_s``: detects launches that hang, and finds out where their workers are."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...gang.keepers import Failing, Keeper, Plain, Remarks, Where
from ...gang.protocol import Told
from ...gang.texts import names
from ...gang.wire import from_plain, to_plain
from ...machine.stacks import FOLDER, HOOK, find_py_spy, hook_environment
from ...node.plan import Plan
from ...node.watchers import Feature, Here, Variables, Watcher
from ...settings import StepSettings, choose
from .stacks import collect

_KIND = "hang"  # of the cause
# How long the nodes may take to write down what the workers of a hang are doing.
_DIAGNOSTICS_S = 15.0
# Output is reported to the gang once in this fraction of hang_timeout_s.
_ACTIVE_PART = 0.1
_MAX_LINES = 64
_MAX_PLACES = 4  # in the sentence that concludes


class Hangs(Feature):
    """When all ranks are silent for too long, writes their stacks down and lets the launch fail."""

    name = "hangs"

    def policy(self, given: Mapping[str, Any], settings: StepSettings) -> Plain:
        """Return the limit, if there is one."""
        limit_s = choose("hang_timeout_s", given, {}, settings).value
        return {} if limit_s is None else {"timeout_s": limit_s}

    def keeper(self, num_nodes: int, of_all: bool) -> Keeper | None:
        """Return what decides that a launch hangs; only the control node does."""
        return HangKeeper() if of_all else None

    def variables(self, plan: Plan, folder: str) -> Variables:
        """Return the variables with which workers can be asked for their stacks."""
        if limit_s(plan) is None:
            return Variables()
        return Variables(hook_environment(os.path.join(folder, FOLDER)), folders=(FOLDER,), hooks=(HOOK,))

    def watcher(self, here: Here) -> Watcher:
        """Return what tells that workers do something, where a limit asks for it."""
        limit = limit_s(here.plan)
        return Watcher() if limit is None else HangWatcher(here, limit)


def limit_s(plan: Plan) -> float | None:
    """Return how long all ranks of a launch may be silent; None sets no limit."""
    found: float | None = plan.policy.features.get(Hangs.name, {}).get("timeout_s")
    return found


@dataclass(frozen=True)
class Diagnostics:
    """What the workers of one node were doing when the launch hung."""

    host: str  # the node's host name
    file: str | None  # where all stacks are; None if they could not be written
    where: dict[int, str]  # global rank -> where in its code it was, in a line


# --- on each node -----------------------------------------------------------------------------


class HangWatcher(Watcher):
    """Reports when workers of this node have written or ended, and where they are in a hang."""

    def __init__(self, here: Here, timeout_s: float) -> None:
        self._here = here
        self._pause_s = timeout_s * _ACTIVE_PART
        self._said_at = float("-inf")

    def poll(self) -> Plain | None:
        """Return how long ago a worker has done something, unless the gang knows of something about as recent."""
        at = self._here.active_at()
        if at is None or at <= self._said_at + self._pause_s:
            return None
        self._said_at = at
        return {"age_s": time.monotonic() - at}

    def before_stop(self, kind: str) -> Plain | None:
        """Write down where every worker is if the launch hangs."""
        if kind != _KIND:
            return None
        here = self._here
        folder, keep_in = os.path.join(here.folder, FOLDER), here.plan.spec.log_dir
        found = collect(here.running(), folder, keep_in, here.name, _DIAGNOSTICS_S, find_py_spy())
        here.show(f"what the workers were doing:\n{found.text}")
        told: Plain = to_plain(Diagnostics(here.host, found.file, found.where))
        return told


# --- on the control node ----------------------------------------------------------------------


class HangKeeper(Keeper):
    """Fails a launch whose ranks are all silent for too long."""

    has_record = False

    def __init__(self) -> None:
        self._timeout_s: float | None = None
        self._active_at = 0.0
        self._found: dict[int, Diagnostics] = {}  # by node

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Start the clock, if the launch has such a limit."""
        self._timeout_s, self._active_at = policy.get("timeout_s"), at_s
        self._found = {}

    def handle(self, node: int, told: Told, at_s: float) -> None:
        """Keep when a worker has done something, or where it was when it did nothing."""
        if "age_s" in told.data:
            self._active_at = max(self._active_at, at_s - told.data["age_s"])
        else:
            self._found[node] = from_plain(Diagnostics, told.data, "hangs")

    def tick(self, at_s: float, where: Callable[[int], Where]) -> Remarks:
        """Have the launch fail if nothing has come for too long."""
        limit_s = self._timeout_s
        if limit_s is None or at_s - self._active_at <= limit_s:
            return Remarks()
        return Remarks(failing=Failing(_KIND, f"no rank wrote anything or exited for {limit_s:g} s"))

    def find_out_s(self, kind: str) -> float:
        """Return how long the nodes may take to ask their workers."""
        return _DIAGNOSTICS_S if kind == _KIND else 0.0

    def detail(self, kind: str) -> str:
        """Return where every rank was when the launch hung, and where the stacks are."""
        if kind != _KIND or not self._found:
            return ""
        found = sorted(self._found.items())
        where = sorted((rank, place) for _, each in found for rank, place in each.where.items())
        files = [f"Stacks of node {node} (host {each.host}): {each.file or 'in its log only'}" for node, each in found]
        return "\n".join([conclusion(where), *_first(_places(where)), *_first(files)])


_FRAME = re.compile(r"(?P<at>\S+:\d+) in (?P<function>[^()]+?)(?: \((?P<inner>in .+)\))?")


def conclusion(where: list[tuple[int, str]]) -> str:
    """Return in one sentence where the ranks were, those at the same place together: "rank 3 in load at data.py:18"."""
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
    """Say where each rank was; of many, those at the same place together."""
    if len(where) <= _MAX_LINES:
        return [f"Rank {rank} was at {place}." for rank, place in where]
    at: dict[str, list[int]] = {}
    for rank, place in where:
        at.setdefault(place, []).append(rank)
    return [f"{names(at[place], 'Rank')} {'was' if len(at[place]) == 1 else 'were'} at {place}." for place in at]


def _first(lines: list[str]) -> list[str]:
    """Return the first of many lines, and how many are left out."""
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], f"{more} more such lines are left out."] if more > 0 else lines
