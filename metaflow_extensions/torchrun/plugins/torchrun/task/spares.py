"""What the spare of a step's first launch is."""

from __future__ import annotations

import os
from contextlib import suppress

from ..compat.renamed import harmless
from ..errors import TorchrunConfigError
from ..gang.wire import Plain
from ..machine.accelerators import Machine, Nproc, choose_nproc
from ..settings import StepSettings
from ..supervisor.command import command_environment, with_hooks


def starts_of(settings: StepSettings, machine: Machine, requested: Nproc | None) -> Plain | None:
    """Return what the spare of a step's first launch is, for `supervisor.warm`; None if `warm` is off, or if this has failed.

    The spare gets the launch's environment, as far as it is known before `run` is called. `requested` is what the
    resources of a task amount to.
    """
    if settings.warm == "off":
        return None
    with harmless():  # all starts are cold then
        nproc = 1
        with suppress(TorchrunConfigError):  # `run` raises it
            nproc = choose_nproc(settings.nproc_per_node, "nproc_per_node", requested, machine).value
        env = with_hooks(command_environment(machine, nproc, {}, os.environ), None)
        workers = nproc if settings.warm == "workers" else 0
        return {"preload": settings.preload, "env": env, "workers": workers}
    return None
