"""How does this node start agents in a tenth of the time? From a warm process, which waits from the step's begin on.

`warm_guardian.py` runs that process, and the agents that are forked from it, one after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..machine import libc
from ..machine.inherited import inherited
from ..scripts.warm_python import kernel, messages
from .agent_events import Refused
from .guardian import Options
from .guardian_process import GuardianProcess

GUARDIAN_ENDED = "the guardian of the warm process has ended"
_ADOPTS = (
    "this task adopts processes without a parent (it is the first of its container, or a subreaper), so the step's code, "
    "which may wait for its children, would see the warm process"
)


class WarmNode:
    """The warm process of this node, with its guardian; belongs to the step's thread, from its begin to its end."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._modules, self._env = list(modules), dict(env)
        self._guardian: GuardianProcess | None = None
        self._owner = os.getpid()

    def begin(self) -> GuardianProcess:
        """Import in the background, unless that has begun; return who does it. May raise anything, at each call."""
        if self._guardian is None or not self._guardian.is_alive:
            if libc.adopts_orphans():
                raise messages.Refused(_ADOPTS)
            self._guardian = GuardianProcess("warm_guardian", [json.dumps(self._modules)], self._env)
        return self._guardian

    def has(self, guardian: GuardianProcess | None) -> bool:
        """Tell whether it is the one of the warm process, which lives on when an agent has ended."""
        return guardian is self._guardian

    def renew(self) -> None:
        """Import anew, in the background."""
        self.close()
        self._guardian = None
        with suppress(Exception):  # a launch will say so
            self.begin()

    def close(self) -> None:
        """End it, without waiting for that; safe to call more than once."""
        if self._guardian is not None and os.getpid() == self._owner:
            self._guardian.close()


@dataclass(frozen=True)
class WarmStart:
    """How one agent is started warm."""

    node: WarmNode
    command: Sequence[str]
    forks_workers: bool = False
    worker_env: Mapping[str, str] = field(default_factory=dict)  # what workers have besides, where they are forked

    def start(self, env: Mapping[str, str], options: Options) -> GuardianProcess | Refused:
        """Ask for the agent; return the guardian that tells what becomes of that, or why there is none."""
        try:
            guardian = self.node.begin()
            described = messages.in_memory(self._request(env, options))
            try:
                return guardian if guardian.tell("start", [described]) else Refused(GUARDIAN_ENDED)
            finally:
                os.close(described)
        except Exception as error:  # a start as a program needs nothing of what can go wrong here
            return Refused(messages.in_words(error))

    def _request(self, env: Mapping[str, str], options: Options) -> dict[str, Any]:
        python, *words = self.command
        program = {
            "argv": [python, "-u", *words],
            "env": dict(env),
            "cwd": options.cwd or os.getcwd(),
            "umask": kernel.umask(),
            "dies_with_parent": True,
            "computes": self.forks_workers,
            "forks_workers": self.forks_workers,
            "worker_env": dict(self.worker_env),
        }
        return {"options": options._asdict(), "inherited": inherited(), "program": program}
