"""What the spare of a step's first launch is."""

from __future__ import annotations

import os
from contextlib import suppress

from ...errors import TorchrunConfigError
from ...gang.wire import Plain
from ...launch.command import agent_environment
from ...launch.services import InTask
from ...machine.accelerators import Machine, Nproc, choose_nproc, omp_threads
from ...node.start import share_of_machine
from ...settings import StepSettings


class Warm(InTask):
    """Spares: processes that have imported torch before a launch needs them."""

    def starts(self, settings: StepSettings, machine: Machine, requested: Nproc | None) -> Plain | None:
        """Return what the spare of a step's first launch is; None if `warm` is off.

        The spare gets the launch's environment, as far as it is known before `run` is called.
        """
        if settings.warm == "off":
            return None
        nproc = 1
        with suppress(TorchrunConfigError):  # `run` raises it
            nproc = choose_nproc(settings.nproc_per_node, "nproc_per_node", requested, machine).value
        env = agent_environment({}, os.environ, omp_threads(machine, nproc), None)
        workers = nproc if settings.warm == "workers" else 0
        return {"preload": settings.preload, "env": {**env, **share_of_machine(machine, {})}, "workers": workers}


PART = Warm()
