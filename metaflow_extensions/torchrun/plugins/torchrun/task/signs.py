"""What tells that a task must end, for its supervisor to look at.

On a local run these are the ends of the processes that have started it; Metaflow (2.19) does not check that.

On Kubernetes a pod that is deleted gets SIGTERM, but only its process 1. That is the shell which Metaflow starts (2.19), and
the kernel drops what a process 1 neither handles nor blocks. Metaflow lets that shell run a script first; ours starts the
shell again with SIGTERM blocked. Then the signal stays pending, and all processes of the pod can see it
(`machine/pods.told_to_stop`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

from ..machine.processes import began

# Names the processes that a task must not outlive: ``run=PID``, and for a node also ``control=PID``.
STARTED_BY = "METAFLOW_TORCHRUN_STARTED_BY"
LOCAL_NODE_MARGIN_S = 10.0
"""What a node's task needs beyond its workers' grace to end by itself."""
_SHELL = "TORCHRUN_POD_SHELL"  # pid of the shell in which SIGTERM is blocked
# What a pod's shell has to run first so that its other processes can see SIGTERM.
# Read by the shell that Metaflow starts as `bash -c COMMANDS`. Without Python, or in another shell, all stays as it is.
# In a pod's environment Kubernetes itself reads two dollars in a row, and one before a parenthesis.
POD_SCRIPT = f"""\
if [ -z "${{{_SHELL}:-}}" ] && [ -n "${{BASH_EXECUTION_STRING:-}}" ] && command -v python >/dev/null; then
export {_SHELL}=$BASHPID
exec python -c 'import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execvp("bash", ["bash", "-c", sys.argv[1]])' "$BASH_EXECUTION_STRING"
fi
"""


def heed_sigterm_in_pod(environ: Mapping[str, str] = os.environ) -> None:
    """Unblock SIGTERM, which this process inherited blocked from the shell; call it before starting any process."""
    if environ.get(_SHELL):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def name_as_starter(env: MutableMapping[str, str], role: Literal["run", "control"]) -> None:
    """Add this process to `env`, so that tasks started with it end when this process is gone."""
    env[STARTED_BY] = f"{env.get(STARTED_BY, '')} {role}={os.getpid()}".strip()


def signs(env: Mapping[str, str], grace_s: float, notice_file: str | None, node: int | None) -> dict[str, Any]:
    """Return what a supervisor has to look at, to know that its task must end; see `supervisor/signs`.

    `node` is that of a local task. On Kubernetes and AWS Batch Metaflow (2.19) asks the cloud for spot notices, and writes
    one to `notice_file`.
    """
    # There is no ``run`` where somebody has started the control task by hand, with the command ``step``; they may want it
    # to outlive the shell. A control task starts the other nodes' tasks, and is named to itself, too.
    named = [word.partition("=") for word in env.get(STARTED_BY, "").split() if node is not None]
    starters = {role: int(pid) for role, _, pid in named if pid.isdigit() and (node or role != "control")}
    shell = env.get(_SHELL, "")  # a user may have set it to something else
    return {
        "starters": {role: (pid, began(pid)) for role, pid in starters.items()},
        "patience_s": grace_s + LOCAL_NODE_MARGIN_S,
        "looks": node is None,
        "notice_file": notice_file,
        "shell": int(shell) if shell.isdecimal() else 0,
    }
