"""Holds the spares of one node, in its supervisor.

One spare agent waits at a time, with its spare workers, and a launch uses it. The next one is started when all workers
of a generation run (for a restart), and when a launch has ended (for the step's next launch).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...compat.renamed import harmless
from ...guardian.agent_events import Refused
from ...guardian.guardian import Options
from ...guardian.guardian_process import GuardianProcess
from ...machine.inherited import inherited, umask
from .imports import StartCold, in_words
from .spare import TORCHRUN


class WarmNode:
    """Holds the waiting spare of this node, if any; one thread at a time uses it."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str], workers: int) -> None:
        self._preload = list(preload)
        self._env, self._workers = dict(env), workers  # of the last launch
        self._waiting: GuardianProcess | None = None
        self._inherited: dict[str, Any] = {}  # by the waiting spare

    def prepare(self) -> None:
        """Start a spare like the last one, unless one waits. A failure is reported when a launch requests the spare."""
        with harmless():
            if self._waiting is None or not self._waiting.is_alive:
                self._start()

    def _start(self) -> None:
        worker_modules = ["torch.distributed", *self._preload]
        options = {"modules": [TORCHRUN], "workers": self._workers, "worker_modules": worker_modules}
        self._inherited = inherited()
        self._waiting = GuardianProcess("features.warm.guardian", [json.dumps(options)], self._env)

    def start(
        self, command: list[str], workers: int, env: Mapping[str, str], options: Options
    ) -> GuardianProcess | Refused:
        """Request an agent, and so many workers that were spares; see `WarmStarts`."""
        refused: list[Exception] = []
        with harmless(refused.append):  # after any failure here the agent starts cold
            agent = {
                "argv": [command[0], "-u", *command[1:]],
                "env": dict(env),
                "cwd": options.cwd or os.getcwd(),
                "umask": umask() if options.umask is None else options.umask,
                "workers": workers,
            }
            request = {"options": options._asdict(), "agent": agent, "command": command}
            return self._ask(json.dumps(request).encode(), env, workers, options.inherited or inherited())
        return Refused(in_words(refused[0]))

    def _ask(self, request: bytes, env: Mapping[str, str], workers: int, now: Mapping[str, Any]) -> GuardianProcess:
        """Return the waiting guardian when it has confirmed the request. May raise any exception."""
        guardian = self._pop(env, workers, now)
        try:
            if guardian.ask(request):
                return guardian
            raise StartCold("the guardian that waited with the spare has ended, or does not answer")
        except BaseException:  # a signal handler may raise while we wait
            guardian.kill()
            guardian.close()
            raise

    def _pop(self, env: Mapping[str, str], workers: int, now: Mapping[str, Any]) -> GuardianProcess:
        """Return the waiting guardian, which the caller must close; `now` is what the task has inherited. May raise any."""
        self._env, self._workers = dict(env), workers or self._workers
        if self._waiting is None or not self._waiting.is_alive:
            self._start()
        assert self._waiting is not None
        if changed := [name for name in now if now[name] != self._inherited[name]]:
            self.close()
            raise StartCold(f"{', '.join(changed)} changed after the step had begun")
        guardian, self._waiting = self._waiting, None
        return guardian

    def renew(self) -> None:
        """Replace the spare in the background, because packages may have changed since it imported them."""
        self.close()
        self.prepare()

    def close(self) -> None:
        """End the spare without waiting for its end; safe to call more than once."""
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    @property
    def pid(self) -> int | None:
        """The pid of the waiting guardian, or None."""
        return None if self._waiting is None else self._waiting.pid
