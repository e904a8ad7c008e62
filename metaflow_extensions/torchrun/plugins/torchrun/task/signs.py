"""What tells that a task must end, for its supervisor to look at.

On a local run these are the ends of the processes that have started it; Metaflow (2.19) does not check that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

from ..machine.processes import began
from .pod_shell import pod_shell

# Names the processes that a task must not outlive: ``run=PID``, and for a node also ``control=PID``.
STARTED_BY = "METAFLOW_TORCHRUN_STARTED_BY"
LOCAL_NODE_MARGIN_S = 10.0
"""What a node's task needs beyond its workers' grace to end by itself."""


def name_as_starter(env: MutableMapping[str, str], role: Literal["run", "control"]) -> None:
    """Add this process to `env`, so that tasks started with it end when this process is gone."""
    env[STARTED_BY] = f"{env.get(STARTED_BY, '')} {role}={os.getpid()}".strip()


def starters(env: Mapping[str, str]) -> dict[str, int]:
    """Return role -> pid of the processes that this one must not outlive.

    There is no ``run`` where somebody has started the control task by hand, with the command ``step``;
    they may want it to outlive the shell.
    """
    named = [word.partition("=") for word in env.get(STARTED_BY, "").split()]
    return {role: int(pid) for role, _, pid in named if pid.isdigit()}


def signs(env: Mapping[str, str], grace_s: float, notice_file: str | None, is_local: bool) -> dict[str, Any]:
    """Return what a supervisor has to look at, to know that its task must end; see `supervisor/signs`.

    On Kubernetes and AWS Batch Metaflow (2.19) asks the cloud for spot notices, and writes one to `notice_file`.
    """
    named = starters(env).items() if is_local else ()
    # A control task starts the other nodes' tasks, and is named to itself, too.
    others = {role: (pid, began(pid)) for role, pid in named if pid != os.getpid()}
    return {
        "starters": others,
        "patience_s": grace_s + LOCAL_NODE_MARGIN_S,
        "looks": not is_local,
        "notice_file": notice_file,
        "shell": pod_shell(env),
    }
