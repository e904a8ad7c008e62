"""How far a launch is, as its scripts tell by lines of JSON, and which ranks are much slower than the others."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from ...errors import TorchrunError
from ...gang.keepers import Happened, Keeper, Plain, Remarks, Where
from ...gang.protocol import Told
from ...gang.wire import from_plain, to_plain
from ...node.plan import Plan
from ...node.watchers import Feature, Here, Variables, Watcher
from ...records.summary import Summary
from ...show.parts.model import Part
from .kept import Progress as Kept
from .page import progress_parts
from .ranks import Ranks, metrics_file
from .stragglers import lines
from .told import Metrics, Pace

# A worker appends lines of JSON to the file that this names. torchrun gives all workers of a node the same environment,
# so a hook in each worker makes the name of the folder's.
METRICS = "TORCHRUN_METRICS"
FOLDER = "TORCHRUN_METRICS_FOLDER"


class Progress(Feature):
    """How far a launch is."""

    name = "progress"
    after = "outcome"
    together = MappingProxyType(
        {
            "straggler": "{ranks}: slower than half the median for a minute",
            "recovered": "{ranks}: no longer slow",
        }
    )

    def keeper(self, num_nodes: int, of_all: bool) -> Keeper:
        """Return what keeps rank 0's values and all ranks' speeds, or the speeds of one node's ranks."""
        return ProgressKeeper() if of_all else OwnPaces()

    def variables(self, plan: Plan, folder: str) -> Variables:
        """Return where a worker finds its file."""
        of_rank = metrics_file(folder.replace("$", "$$"), "${local_rank}")
        return Variables({FOLDER: os.path.dirname(metrics_file(folder, 0))}, {METRICS: of_rank})

    def watcher(self, here: Here) -> Watcher:
        """Return what reads the workers' files."""
        return ProgressWatcher(here)

    def result(self, told: Plain) -> Mapping[str, Any]:
        """Return rank 0's last values."""
        return {"metrics": {key: math.nan if value is None else value for key, value in told.items()}}

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return how far the launch is, where its scripts tell."""
        return progress_parts(kept, summary) if kept else ()


class ProgressWatcher(Watcher):
    """Reads the workers' files."""

    def __init__(self, here: Here) -> None:
        self._ranks = Ranks(here.folder, dict(enumerate(here.plan.ranks)), here.has_ended)
        self._say = here.say

    def poll(self) -> Plain | None:
        """Return what is new, every 5 s."""
        told = self._told(self._ranks.due())
        if (complaint := self._ranks.pop_complaint()) is not None:
            self._say(complaint)
        return told

    def ended(self) -> Plain | None:
        """Return what the workers have told before their end."""
        return self._told(self._ranks.rest())

    def _told(self, metrics: Metrics | None) -> Plain | None:
        if metrics is None:
            return None
        self.saw_workers = True
        plain: Plain = to_plain(metrics)
        return plain


class ProgressKeeper(Keeper):
    """Keeps the progress of the last launch whose scripts have told any."""

    def __init__(self) -> None:
        self._kept = Kept()

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Compare all ranks anew."""
        self._kept.begin()

    def handle(self, node: int, told: Told, at_s: float) -> None:
        """Keep what a node tells of its ranks."""
        metrics = from_plain(Metrics, told.data, "progress")
        if told.launch != self._kept.launch:
            self._kept = Kept(told.launch)
        self._kept.take(node, metrics, at_s)

    def ended(self, node: int, ok: bool) -> None:
        """Compare the node's ranks no more."""
        self._kept.forget(node, ok)

    def tick(self, at_s: float, where: Callable[[int], Where]) -> Remarks:
        """Say which ranks have become slow, or are no longer."""
        changes = self._kept.look(at_s, where)
        happened = [
            Happened("straggler" if each.is_slow else "recovered", where(each.rank).node, each.text, each.rank)
            for each in changes
        ]
        return Remarks(tuple(lines(changes, where)), tuple(happened))

    def record(self) -> Plain | None:
        """Return the progress, or None where no script has told any."""
        return self._kept.as_dict()

    def verdict(self, launch: int, to_control: bool, error: TorchrunError | None) -> Plain:
        """Return rank 0's last values."""
        return dict(self._kept.last) if self._kept.launch == launch else {}


class OwnPaces(Keeper):
    """Keeps how fast each rank of one node is."""

    def __init__(self) -> None:
        self._paces: Mapping[int, Pace] = {}

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Forget what the workers before have told."""
        self._paces = {}

    def handle(self, node: int, told: Told, at_s: float) -> None:
        """Keep what the node tells; at the end of the workers the speeds are missing, and the last ones are kept."""
        self._paces = from_plain(Metrics, told.data, "progress").paces or self._paces

    def record(self) -> Plain | None:
        """Return the speeds by rank."""
        paces = {str(rank): asdict(pace) for rank, pace in sorted(self._paces.items())}
        return {"paces": paces} if paces else None
