"""Launches that start faster than cold; what the core calls of it."""

from __future__ import annotations

from ...machine.accelerators import Machine, Nproc
from ...node.plan import WarmStarts
from ...node.watchers import Feature
from ...settings import StepSettings
from .begin import begin_warm


class Warm(Feature):
    """Spares: processes that have imported torch before a launch needs them."""

    name = "warm"

    def starts(self, settings: StepSettings, machine: Machine, requested: Nproc | None) -> WarmStarts | None:
        """Start the first spare of a step."""
        return begin_warm(settings, machine, requested)
