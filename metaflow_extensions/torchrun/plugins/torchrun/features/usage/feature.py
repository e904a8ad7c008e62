"""What the nodes use while their workers run: measured on each node, kept as one series for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...gang.keepers import Keeper, Plain
from ...gang.protocol import Told
from ...gang.wire import from_plain, to_plain
from ...node.watchers import Feature, Here, Watcher
from ...records.summary import Summary
from ...show.parts.model import Part
from .meter import UsageMeter, Used
from .page import usage_parts
from .series import UsageHistory, step_s


class Usage(Feature):
    """What the nodes use."""

    name = "usage"
    after = "timeline"

    def keeper(self, num_nodes: int, of_all: bool) -> Keeper:
        """Return what keeps the series."""
        return UsageKeeper(UsageHistory(num_nodes if of_all else 1, step_s(num_nodes)))

    def watcher(self, here: Here) -> Watcher:
        """Return what measures."""
        return UsageWatcher(here)

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return the charts; an old run has none."""
        return usage_parts(kept) if kept else ()


class UsageKeeper(Keeper):
    """Keeps what the nodes have used."""

    def __init__(self, history: UsageHistory) -> None:
        self._history = history

    def handle(self, node: int, told: Told, at_s: float) -> None:
        """Keep what a node has used."""
        used = from_plain(Used, told.data, "usage")
        self._history.note(node, at_s, used.of, used.values, used.limits)

    def record(self) -> Plain:
        """Return the series of all nodes."""
        return self._history.as_data()


class UsageWatcher(Watcher):
    """Measures once the guardian runs, which is the root of all processes of a launch."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self._meter: UsageMeter | None = None

    def poll(self) -> Plain | None:
        """Return what was used since the last time, if it is time to tell it."""
        if self._meter is None:
            pid = self._here.pid()
            if pid is None:
                return None
            self._meter = UsageMeter(self._here.plan, self._here.folder, self._here.follower, pid)
        used = self._meter.look()
        told: Plain | None = None if used is None else to_plain(used)
        return told

    def close(self) -> None:
        """Measure no more."""
        if self._meter is not None:
            self._meter.close()
