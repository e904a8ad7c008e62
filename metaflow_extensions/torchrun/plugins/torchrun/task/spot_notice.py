"""Detects that this node's machine or pod is about to be taken away.

There are two signs besides a SIGTERM to the task itself. On Kubernetes and AWS Batch Metaflow (2.19) asks the cloud
for spot notices, and writes one to the file that ``current.spot_termination_notice`` names. On Kubernetes a pod that is
deleted gets SIGTERM, but only its process 1. That is the shell which Metaflow starts (2.19), and the kernel
drops what a process 1 neither handles nor blocks. Metaflow lets that shell run a script first; ours starts the shell
again with SIGTERM blocked. Then the signal stays pending, and all processes of the pod can see it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ..machine import processes

_LOOK_S = 0.25  # Metaflow's pods have two seconds between SIGTERM and SIGKILL, unless the deletion sets more
_SHELL = "TORCHRUN_POD_SHELL"  # pid of the shell in which SIGTERM is blocked
# What a pod's shell has to run first so that `pod_is_told_to_stop` can see SIGTERM.
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


def pod_is_told_to_stop(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this pod will stop if SIGTERM is pending for its shell; else None."""
    status = processes.status(int(environ.get(_SHELL, "0")))
    pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
    told = pending >> (signal.SIGTERM - 1) & 1
    return (
        "its pod got SIGTERM (it is deleted, evicted or over its time limit, or its machine drained)" if told else None
    )


def _spot_notice(path: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not there yet
        return None
    when = lines[0].strip() if lines else ""
    return f"a spot notice says that its machine will be taken away ({when or 'no date'})"


def watch(notice_file: str | None, on_sign: Callable[[str], None]) -> threading.Event:
    """Have a daemon thread call `on_sign` once, with the text of the first sign; the returned event stops it.

    `on_sign` must be safe in any thread.
    """
    over = threading.Event()

    def look() -> None:
        why = None
        while why is None and not over.wait(_LOOK_S):
            why = pod_is_told_to_stop() or (_spot_notice(notice_file) if notice_file else None)
        if why is not None:
            on_sign(why)

    threading.Thread(target=look, name="torchrun-preemption", daemon=True).start()
    return over
