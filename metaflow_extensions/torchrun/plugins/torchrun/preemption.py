"""Sees that this node's machine is about to be taken away.

On Kubernetes and AWS Batch Metaflow (2.19) asks the cloud for spot notices and writes one to the file that
``current.spot_termination_notice`` names. The other kind of preemption, SIGTERM to the task, is
`membership`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

_LOOK_S = 1.0  # a notice comes two minutes ahead on AWS, and Metaflow asks for it every 5 s


def watch_spot_notice(path: str, on_notice: Callable[[str], None]) -> threading.Event:
    """Call `on_notice` once with the notice when its file appears; returns at once.

    Parameters
    ----------
    path : str
        The file.
    on_notice : callable
        Takes the file's first line; called in a daemon thread.

    Returns
    -------
    threading.Event
        Set it to stop watching.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            try:
                lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:  # not there yet
                continue
            on_notice(lines[0].strip() if lines else "")
            return

    threading.Thread(target=watch, name="torchrun-spot", daemon=True).start()
    return over
