"""Holds the spares of one node, in its supervisor.

One spare agent waits at a time, with its spare workers, and a launch uses it. The next one is started when all workers
of a generation run (for a restart), and when a launch has ended (for the step's next launch).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from ..compat.renamed import harmless
from ..gang.wire import Plain
from ..machine.processes import HELPERS, living_descendants, send_signal
from ..worker.spare_process import READ_AT_START, Spare, StartCold, in_words
from .agent import Options, Refused


class WarmNode:
    """Holds the waiting spare of this node, if any."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str], workers: int) -> None:
        # The modules of a user may read any variable.
        self._of_workers = {"modules": ["torch.distributed", *preload], "allows_new": not preload}
        self._first = env  # of the step's first launch, as the next three are of the last one
        self._env, self._cwd, self._workers = env, os.getcwd(), workers
        self._waiting: Spare | None = None
        self._why_none = ""  # why none waits

    def prepare(self) -> None:
        """Start a spare like the last one, unless one waits. A failure is reported when a launch requests the spare."""
        with harmless():
            if self._waiting is not None and self._waiting.process.poll() is None:
                return
            self.close()
            options = {"modules": ["torch.distributed.run"], "workers": self._workers, "of_workers": self._of_workers}
            self._waiting = Spare("agent", options, self._env, self._cwd)
            HELPERS.add(self._waiting.process.pid)

    def start(self, command: list[str], workers: int, env: Mapping[str, str], options: Options) -> Spare | Refused:
        """Request an agent, and so many workers that were spares; or return why there is none."""
        # A spare needs no variable that a program may bring: the next call of `run` may give it another value.
        needs_new = () if self._of_workers["allows_new"] else env.keys()
        needed = {name for name in env if name in {*self._first, *needs_new} or name.startswith(READ_AT_START)}
        self._env = {name: env[name] for name in needed}
        self._cwd, self._workers = options.cwd or os.getcwd(), workers or self._workers
        try:
            if self._waiting is None:
                raise StartCold(self._why_none)
            argv = [command[0], "-u", *command[1:]]
            request = {"argv": argv, "env": dict(env), "cwd": self._cwd, "workers": workers}
            with open(options.stdout, "ab") as out, open(options.stderr, "ab") as err:
                self._waiting.ask(request, out.fileno(), err.fileno())
            spare, self._waiting = self._waiting, None
            self._why_none = "no spare was prepared since the last start"
            HELPERS.discard(spare.process.pid)
            return spare
        except Exception as error:  # whatever it is, the agent starts cold
            self.close()
            return Refused(in_words(error))

    def close(self, why: str = "its spare could not be started") -> None:
        """End the spare without waiting for its end; safe to call more than once. `why` is said to who requests one."""
        self._why_none = why
        if self._waiting is not None:
            spare, self._waiting = self._waiting, None
            for pid in living_descendants(spare.process.pid):  # its workers, which may still import
                send_signal(pid, signal.SIGKILL)
            spare.kill()
            HELPERS.discard(spare.process.pid)  # who reaps orphans reaps it


def begin_spares(starts: Plain | None) -> WarmNode | None:
    """Begin what `task.join.starts_of` asks for."""
    with harmless():  # all starts are cold then
        if starts is not None:
            warm = WarmNode(starts["preload"], starts["env"], starts["workers"])
            warm.prepare()
            return warm
    return None
