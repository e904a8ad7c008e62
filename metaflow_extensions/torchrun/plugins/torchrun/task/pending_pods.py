"""Prints what keeps a pod from starting while it waits, in the process that looks after the remote job.

When the gang has given up, the pod is gone, and its reason with it.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from ..compat.jobs import running_job
from ..logs.console import write_text
from .job_ends import End, pending

_EVERY_S, _MOST_S = 10.0, 120.0  # at first, and after some minutes: a job waits at its begin, as a rule


class PendingPods:
    """The pods of the job that can't start, also those that have vanished since."""

    def __init__(self) -> None:
        self._waits: dict[str, End] = {}  # by the pod's name; replaced as a whole, since two threads use it
        self._said: set[str] = set()

    @property
    def ends(self) -> list[End]:
        """What is known of these pods."""
        return list(self._waits.values())

    def watch(self) -> None:
        """Look now and then until the process ends, in a daemon thread."""
        threading.Thread(target=self._run, name="torchrun-pods", daemon=True).start()

    def _run(self) -> None:
        pause_s = _EVERY_S
        while True:
            time.sleep(pause_s)
            # The API server may refuse, or Metaflow's names may have changed: then nothing is said, as in `jobs`.
            with suppress(Exception):
                write_text("stderr", self.look())
            pause_s = min(_MOST_S, 1.2 * pause_s)

    def look(self) -> str:
        """Ask once; return the lines on pods that wait for the second time. Many wait for a moment."""
        job = running_job()
        if job is None:
            return ""
        now, before = pending(job), self._waits
        vanished = {name: end for name, end in before.items() if name not in now}
        self._waits = {**vanished, **{name: end for name, end in now.items() if end is not None}}
        stay = [name for name in self._waits if name in before and name not in vanished and name not in self._said]
        self._said.update(stay)
        return "".join(f"[torchrun] {self._waits[name].line()}\n" for name in stay)
