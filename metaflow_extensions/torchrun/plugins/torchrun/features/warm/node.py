"""Holds the spares of one node, in its supervisor.

One spare agent waits at a time, with its spare workers, and a launch uses it. The next one is started when all workers
of a generation run (for a restart), and when a launch has ended (for the step's next launch).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...compat.renamed import harmless
from ...machine.inherited import inherited, umask
from ...machine.processes import HELPERS, living_descendants, send_signal
from ...node.agent import Options
from ...node.agent_events import Refused
from .imports import StartCold, in_words
from .spare import TORCHRUN
from .spare_process import ANSWER_S, Spare


class WarmNode:
    """Holds the waiting spare of this node, if any."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str], workers: int) -> None:
        self._preload = list(preload)
        self._env, self._workers = dict(env), workers  # of the last launch
        self._waiting: Spare | None = None
        self._inherited: dict[str, Any] = {}  # by the waiting spare

    def prepare(self) -> None:
        """Start a spare like the last one, unless one waits. A failure is reported when a launch requests the spare."""
        with harmless():
            if not self._waits():
                self._start()

    def _waits(self) -> bool:
        return self._waiting is not None and self._waiting.process.poll() is None

    def _start(self) -> None:
        self.close()
        worker_modules = ["torch.distributed", *self._preload]
        options = {"modules": [TORCHRUN], "workers": self._workers, "worker_modules": worker_modules}
        self._inherited = inherited()
        self._waiting = Spare("agent", options, self._env, stdin=subprocess.DEVNULL)
        HELPERS.add(self._waiting.process.pid)

    def start(self, command: list[str], workers: int, env: Mapping[str, str], options: Options) -> Spare | Refused:
        """Request an agent, and so many workers that were spares; see `WarmStarts`."""
        refused: list[Exception] = []
        with harmless(refused.append):  # after any failure here the agent starts cold
            request = {
                "argv": [command[0], "-u", *command[1:]],
                "env": dict(env),
                "cwd": options.cwd or os.getcwd(),
                "umask": umask() if options.umask < 0 else options.umask,
                "workers": workers,
            }
            return self._ask(request, options, env, workers)
        return Refused(in_words(refused[0]))

    def _ask(self, request: Mapping[str, Any], options: Options, env: Mapping[str, str], workers: int) -> Spare:
        """Return the waiting spare, which has got the request. May raise any exception."""
        spare = self._pop(env, workers, options.inherited or inherited())
        try:
            with open(options.stdout, "ab") as out, open(options.stderr, "ab") as err:
                spare.ask(request, out.fileno(), err.fileno(), time.monotonic() + ANSWER_S)
            return spare
        except BaseException:
            spare.kill()
            raise

    def _pop(self, env: Mapping[str, str], workers: int, now: Mapping[str, Any]) -> Spare:
        """Return the waiting spare, which belongs to the caller now; `now` is what the task has inherited. May raise any."""
        self._env, self._workers = dict(env), workers or self._workers
        if not self._waits():
            self._start()
        assert self._waiting is not None
        if changed := [name for name in now if now[name] != self._inherited[name]]:
            self.close()
            raise StartCold(f"{', '.join(changed)} changed after the step had begun")
        spare, self._waiting = self._waiting, None
        HELPERS.discard(spare.process.pid)
        return spare

    def renew(self) -> None:
        """Replace the spare in the background, because packages may have changed since it imported them."""
        self.close()
        self.prepare()

    def close(self) -> None:
        """End the spare without waiting for its end; safe to call more than once."""
        if self._waiting is not None:
            spare, self._waiting = self._waiting, None
            for pid in living_descendants(spare.process.pid):  # its workers, which may still import
                send_signal(pid, signal.SIGKILL)
            spare.kill()
            HELPERS.discard(spare.process.pid)  # who reaps orphans reaps it
            spare.process.returncode = -signal.SIGKILL

    @property
    def pid(self) -> int | None:
        """The pid of the waiting spare, or None."""
        return None if self._waiting is None else self._waiting.process.pid
