"""The first spare of a step, whose launch is not known yet."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from ...errors import TorchrunConfigError
from ...launch.command import agent_environment
from ...machine.accelerators import Machine, Nproc, choose_nproc, omp_threads
from ...node.start import share_of_machine
from ...settings import StepSettings
from .node import WarmNode

# Is taken out of the environment before the step's code runs (`task.starters`), so no launch has it.
_OF_TASKS = "METAFLOW_TORCHRUN_STARTED_BY"


def begin_warm(settings: StepSettings, machine: Machine, requested: Nproc | None) -> WarmNode | None:
    """Start the spare of a step's first launch, in the background; return None where the user wants none.

    Its environment is as far as it is known that of the launch. `requested` is what the resources of a task amount to.
    """
    if settings.warm == "off" or sys.platform != "linux":
        return None
    nproc = 1
    with suppress(TorchrunConfigError):  # `run` raises it
        nproc = choose_nproc(settings.nproc_per_node, "nproc_per_node", requested, machine).value
    inherited = {name: value for name, value in os.environ.items() if name != _OF_TASKS}
    env = agent_environment({}, inherited, omp_threads(machine, nproc), None)
    workers = nproc if settings.warm == "workers" else 0
    warm = WarmNode(settings.preload, {**env, **share_of_machine(machine, {})}, workers)
    warm.prepare()
    return warm
