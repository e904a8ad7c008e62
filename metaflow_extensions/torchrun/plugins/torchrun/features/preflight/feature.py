"""The feature ``@torchrun(preflight=...)``: checks and measures the gang's network before the first launch.

`preflight_worker` measures it, in a separate launch.
"""

from __future__ import annotations

import os

from ...launch.spec import LaunchSpec
from ...node.preludes import Asked, Prelude, own_launch
from ...node.watchers import Feature

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "preflight_worker.py")


class Preflight(Feature):
    """The check of the network before the first launch."""

    name = "preflight"

    def prelude(self, asked: Asked) -> Prelude | None:
        """Return the measuring launch, once in a step."""
        return NetworkFirst(asked) if asked.settings.preflight and not asked.has_been else None


class NetworkFirst(Prelude):
    """The launch that measures the network."""

    failed = "The preflight failed (@torchrun(preflight=...)); the script was not started on any node."

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def spec(self, of_run: LaunchSpec) -> LaunchSpec | None:
        """Return the launch that measures for `of_run`; None if that has one process."""
        if of_run.world_size == 1:
            self._asked.say("preflight: one process in all, so there is nothing to measure")
            return None
        ranks = of_run.world_size
        self._asked.say(f"preflight: measures the network between {ranks} ranks before the script starts")
        return own_launch(of_run, SCRIPT)
