"""The spares of one node, as its task holds them.

One spare agent, with its workers, waits at a time. A launch takes it. The next one is started for a restart when all
workers of a generation run, and for the step's next launch when a launch has ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...compat import linux
from ...compat.renamed import harmless
from ...guardian.agent_events import Refused
from ...guardian.guardian import Options
from ...guardian.guardian_process import GuardianProcess
from .guardian import Request
from .imports import StartCold, in_words
from .inherited import difference, inherited, umask
from .spare import AGENT

_ADOPTS = (
    "this task adopts processes without a parent (it is the first of its container, or a subreaper), so the step's code, "
    "which may wait for its children, would see the spare"
)


class WarmNode:
    """The spare of this node, while one waits; belongs to the step's thread."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str], workers: int) -> None:
        self._preload = list(preload)
        self._env, self._workers = dict(env), workers  # as the last launch had them
        self._waiting: GuardianProcess | None = None
        self._inherited: dict[str, str] = {}  # by the one that waits
        self._owner = os.getpid()

    def to_start(
        self, cold_command: list[str], command: list[str], workers: int, worker_env: Mapping[str, str]
    ) -> WarmStart:
        """Return how to start one agent; see `WarmStarts`."""
        return WarmStart(self, command, cold_command, workers, worker_env)

    def prepare(self) -> None:
        """Start a spare like the last one, unless one waits. What goes wrong is told when a launch asks for it."""
        with harmless():
            if not (self._waiting is not None and self._waiting.is_alive):
                self._start()

    def _start(self) -> None:
        if linux.adopts_orphans():
            raise StartCold(_ADOPTS)
        options = {
            "modules": [AGENT],
            "workers": self._workers,
            "worker_modules": ["torch.distributed", *self._preload],
        }
        self._inherited = inherited()
        self._waiting = GuardianProcess("features.warm.guardian", [json.dumps(options)], self._env)

    def take(self, env: Mapping[str, str], workers: int) -> GuardianProcess:
        """Return the guardian that waits, which is the caller's then; may raise anything."""
        self._env, self._workers = dict(env), workers or self._workers
        if self._waiting is None or not self._waiting.is_alive:
            self._start()
        assert self._waiting is not None
        changed = difference(self._inherited, inherited())
        if changed is not None:
            self.close()
            raise StartCold(changed)
        taken, self._waiting = self._waiting, None
        return taken

    def renew(self) -> None:
        """Have another spare import anew, in the background."""
        self.close()
        self.prepare()

    def close(self) -> None:
        """End the spare, without waiting for that; safe to call more than once."""
        if self._waiting is not None and os.getpid() == self._owner:
            self._waiting.close()
            self._waiting = None

    @property
    def pid(self) -> int | None:
        """The pid of the guardian that waits; None without one."""
        return None if self._waiting is None else self._waiting.pid


@dataclass(frozen=True)
class WarmStart:
    """How one agent is started warm."""

    node: WarmNode
    command: Sequence[str]  # of a spare agent
    cold_command: Sequence[str]
    workers: int  # that are spares, too
    worker_env: Mapping[str, str]  # what these have besides

    def start(self, env: Mapping[str, str], options: Options) -> GuardianProcess | Refused:
        """Ask for the agent; return its guardian, or why nobody takes the request."""
        refused: list[Exception] = []
        with harmless(refused.append):  # a cold start needs nothing of what can go wrong here
            told = options._replace(cwd=options.cwd or os.getcwd())._asdict()
            commands = [self.command[0], "-u", *self.command[1:]], self.cold_command
            request = Request(told, dict(env), umask(), self.workers, self.worker_env, *commands)
            data = json.dumps(request).encode()
            guardian = self.node.take(env, self.workers)
            if guardian.ask(data):
                return guardian
            guardian.close()
            raise StartCold("the guardian that waited with the spare has ended, or does not read")
        return Refused(in_words(refused[0]))
