"""Holds the spares of one node, in its task.

One spare agent waits at a time, with its spare workers, and a launch uses it. The next one is started when all workers
of a generation run (for a restart), and when a launch has ended (for the step's next launch).
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping, Sequence

from ...compat import linux
from ...compat.renamed import harmless
from ...guardian.agent_events import Refused
from ...guardian.guardian import Options
from ...guardian.guardian_process import GuardianProcess
from ...machine.processes import read
from .imports import StartCold, in_words
from .spare import TORCHRUN

_ADOPTS = (
    "this task adopts processes without a parent (it is the first of its container, or a subreaper), so the step's code, "
    "which may wait for its children, would see the spare"
)
_LIMITS = sorted({name for name in dir(resource) if name.startswith("RLIMIT_")} - {"RLIMIT_OFILE"})  # NOFILE's old name


class WarmNode:
    """Holds the waiting spare of this node, if any; only the step's thread uses it."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str], workers: int) -> None:
        self._preload = list(preload)
        self._env, self._workers = dict(env), workers  # of the last launch
        self._waiting: GuardianProcess | None = None
        self._inherited: dict[str, str] = {}  # by the waiting spare
        self._owner = os.getpid()

    def prepare(self) -> None:
        """Start a spare like the last one, unless one waits. A failure is reported when a launch requests the spare."""
        with harmless():
            if self._waiting is None or not self._waiting.is_alive:
                self._start()

    def _start(self) -> None:
        if linux.adopts_orphans():
            raise StartCold(_ADOPTS)
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
            options = options._replace(cwd=options.cwd or os.getcwd())
            agent = {
                "argv": [command[0], "-u", *command[1:]],
                "env": dict(env),
                "cwd": options.cwd,
                "umask": umask(),
                "workers": workers,
            }
            request = {"options": options._asdict(), "agent": agent, "command": command}
            return self._ask(json.dumps(request).encode(), env, workers)
        return Refused(in_words(refused[0]))

    def _ask(self, request: bytes, env: Mapping[str, str], workers: int) -> GuardianProcess:
        """Return the waiting guardian when it has confirmed the request. May raise any exception."""
        guardian = self._pop(env, workers)
        try:
            if guardian.ask(request):
                return guardian
            raise StartCold("the guardian that waited with the spare has ended, or does not answer")
        except BaseException:  # a signal handler may raise while we wait
            guardian.kill()
            guardian.close()
            raise

    def _pop(self, env: Mapping[str, str], workers: int) -> GuardianProcess:
        """Return the waiting guardian, which the caller must close. May raise any exception."""
        self._env, self._workers = dict(env), workers or self._workers
        if self._waiting is None or not self._waiting.is_alive:
            self._start()
        assert self._waiting is not None
        now = inherited()
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
        # A process that the step has forked has a copy of the socket, but must not end its parent's spare.
        if self._waiting is not None and os.getpid() == self._owner:
            self._waiting.close()
            self._waiting = None

    @property
    def pid(self) -> int | None:
        """The pid of the waiting guardian, or None."""
        return None if self._waiting is None else self._waiting.pid


def inherited() -> dict[str, str]:
    """Return the limits, user, cgroup, priority and CPUs of the calling thread, which its children inherit.

    A spare has those of its start. If they differ at the request, the start is cold.
    """
    return {
        **{name: str(resource.getrlimit(getattr(resource, name))) for name in _LIMITS},
        "user and groups": f"{os.geteuid(), os.getegid()} {sorted(os.getgroups())}",
        "cgroup": read("/proc/self/cgroup"),
        "priority": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "oom_score_adj": read("/proc/self/oom_score_adj"),
        "CPU affinity": str(sorted(os.sched_getaffinity(0))),
    }


def umask() -> int:
    """Return the umask of this process from /proc (Linux 4.7). `os.umask` would change it for all threads."""
    fields = dict(line.partition(":")[::2] for line in read("/proc/self/status").splitlines())
    return int(fields["Umask"], 8)
