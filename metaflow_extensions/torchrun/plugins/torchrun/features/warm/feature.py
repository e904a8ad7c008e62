"""Launches that start faster than cold; what the core calls of it."""

from __future__ import annotations

from ...machine.accelerators import Machine, Nproc
from ...node.plan import WarmStarts
from ...node.watchers import Feature
from ...settings import StepSettings


class Warm(Feature):
    """Spares: processes that have imported torch before a launch needs them."""

    name = "warm"

    def starts(self, settings: StepSettings, machine: Machine, requested: Nproc | None) -> WarmStarts | None:
        """Start the first spare of a step."""
        from .node import begin_warm  # who only shows a gang has no need of it: it imports all that starts a launch

        return begin_warm(settings, machine, requested)
