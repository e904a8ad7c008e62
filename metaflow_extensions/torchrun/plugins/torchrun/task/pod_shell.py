"""Lets a task see that its pod is told to stop.

On Kubernetes a pod that is deleted gets SIGTERM, but only its process 1. That is the shell which Metaflow starts (2.19), and
the kernel drops what a process 1 neither handles nor blocks. Metaflow lets that shell run a script first; ours starts the
shell again with SIGTERM blocked. Then the signal stays pending, and all processes of the pod can see it
(`machine/pods.told_to_stop`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

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


def pod_shell(environ: Mapping[str, str] = os.environ) -> int:
    """Return the pid of that shell; 0 where there is none, or where a user has set the variable so that there is none."""
    pid = environ.get(_SHELL, "")
    return int(pid) if pid.isdecimal() else 0
