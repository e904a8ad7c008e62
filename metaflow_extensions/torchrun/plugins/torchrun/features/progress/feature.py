"""The feature of progress: scripts report steps and values as lines of JSON; ranks that are much slower are named."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...gang.keepers import Keeper, Plain
from ...node.plan import Plan
from ...node.watchers import Feature, Here, Variables, Watcher
from ...records.summary import Summary
from ...show.parts.model import Part
from .kept import ProgressKeeper
from .page import progress_parts
from .ranks import ProgressWatcher, metrics_file

# A worker appends lines of JSON to the file in METRICS. torchrun gives all workers of a node the same environment, so a
# hook in each worker sets METRICS from FOLDER.
METRICS = "TORCHRUN_METRICS"
FOLDER = "TORCHRUN_METRICS_FOLDER"


class Progress(Feature):
    """The progress of a launch."""

    name = "progress"
    after = "outcome"
    together = MappingProxyType(
        {"straggler": "{ranks}: slower than half the median for a minute", "recovered": "{ranks}: no longer slow"}
    )

    def keeper(self, num_nodes: int) -> Keeper | None:
        """Return the keeper of rank 0's values and all ranks' speeds; only the control node has one."""
        return ProgressKeeper()

    def variables(self, plan: Plan, folder: str) -> Variables:
        """Return the variables with the path of each worker's file."""
        of_rank = metrics_file(folder.replace("$", "$$"), "${local_rank}")
        return Variables({FOLDER: os.path.dirname(metrics_file(folder, 0))}, {METRICS: of_rank})

    def watcher(self, here: Here) -> Watcher:
        """Return the watcher that reads the workers' files."""
        return ProgressWatcher(here)

    def result(self, told: Plain) -> Mapping[str, Any]:
        """Return rank 0's last values."""
        return {"metrics": {key: math.nan if value is None else value for key, value in told.items()}}

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return the progress section, if the scripts report any."""
        # In development versions of 0.3.0, other nodes than the control node kept only speeds.
        return progress_parts(kept, summary) if kept and "series" in kept else ()
