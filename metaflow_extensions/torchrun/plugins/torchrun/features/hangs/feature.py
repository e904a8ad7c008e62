"""Launches that hang: ``hang_timeout_s``, on one node and on the control node."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from ...gang.keepers import Keeper, Plain
from ...gang.wire import to_plain
from ...node.plan import Plan
from ...node.watchers import Feature, Here, Variables, Watcher
from ...settings import StepSettings, choose
from .kept import DIAGNOSTICS_S, KIND, Active, Diagnostics, HangKeeper
from .stacks import collect, find_py_spy, hook_environment

_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook.py")
# Where workers leave their stacks when asked for them, in the folder of their logs.
_STACKS = "stacks"
# The gang hears of output once in this part of hang_timeout_s.
_ACTIVE_PART = 0.1


class Hangs(Feature):
    """All ranks are silent for too long: what they do is written down, and the launch fails."""

    name = "hangs"

    def policy(self, given: Mapping[str, Any], settings: StepSettings) -> Plain:
        """Return the limit, if there is one."""
        limit_s = choose("hang_timeout_s", given, {}, settings).value
        return {} if limit_s is None else {"timeout_s": limit_s}

    def keeper(self, num_nodes: int, of_all: bool) -> Keeper | None:
        """Return what decides that a launch hangs; only the control node does."""
        return HangKeeper() if of_all else None

    def variables(self, plan: Plan, folder: str) -> Variables:
        """Return what lets workers be asked what they do."""
        if limit_s(plan) is None:
            return Variables()
        return Variables(hook_environment(os.path.join(folder, _STACKS)), folders=(_STACKS,), hooks=(_HOOK,))

    def watcher(self, here: Here) -> Watcher:
        """Return what tells that workers do something, where a limit asks for it."""
        limit = limit_s(here.plan)
        return Watcher() if limit is None else HangWatcher(here, limit)


def limit_s(plan: Plan) -> float | None:
    """Return how long all ranks of a launch may be silent; None does not look."""
    found: float | None = plan.policy.features.get(Hangs.name, {}).get("timeout_s")
    return found


class HangWatcher(Watcher):
    """Tells when workers of this node have written or ended, and where they are when all hang."""

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
        told: Plain = to_plain(Active(time.monotonic() - at))
        return told

    def before_stop(self, kind: str) -> Plain | None:
        """Write down where every worker is if the launch hangs."""
        if kind != KIND:
            return None
        here = self._here
        folder, keep_in = os.path.join(here.folder, _STACKS), here.plan.spec.log_dir
        found = collect(here.running(), folder, keep_in, here.name, DIAGNOSTICS_S, find_py_spy())
        here.show(f"what the workers were doing:\n{found.text}")
        told: Plain = to_plain(Diagnostics(here.host, found.file, found.where))
        return told
