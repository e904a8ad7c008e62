"""The spare workers of a spare agent, and the replacement of torchrun's `Popen` that uses them."""

from __future__ import annotations

import importlib
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .imports import in_words
from .spare_process import ANSWER_S, Spare

AGENT_PID = "TORCHRUN_AGENT_PID"
# torchrun starts its workers with this module's `Popen` (torch 2.3 to 2.13: `SubprocessHandler._popen`).
POPEN_OF_WORKERS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


class SpareWorkers:
    """The spare workers of a spare agent."""

    def __init__(self, options: Mapping[str, Any], client: socket.socket) -> None:
        self._count = options["workers"]
        self._options = {"modules": options["worker_modules"]}
        self._client = client
        self._spares: list[Spare] = []
        self._deadline = 0.0  # for all to become workers
        self._said: set[str] = set()
        if len(os.sched_getaffinity(0)) >= 2 * (self._count + 1):
            self.start(has_imported=False)

    def start(self, has_imported: bool) -> None:
        """Start them, unless they run or a launch already waits, for which torchrun itself starts workers sooner.

        On few cores, spare workers would slow down the imports of the agent, which a launch needs first. So there they
        start after these imports.
        """
        if has_imported and (self._spares or select.select([self._client], [], [], 0)[0]):
            return
        env = {**os.environ, AGENT_PID: str(os.getpid())}
        with suppress(OSError):  # no more processes or files: torchrun itself starts the workers
            for _ in range(self._count):
                self._spares.append(Spare("worker", self._options, env))

    def keep(self, count: int) -> None:
        """End all but `count` spares."""
        while len(self._spares) > count:
            self._spares.pop().end()

    def serve(self, umask: int) -> None:
        """Replace torchrun's `Popen`, so that its workers start from spares."""
        module = importlib.import_module(POPEN_OF_WORKERS)
        # A torch without this name starts its workers in another way. The AttributeError then leads to a cold start.
        start = module.Popen

        def popen(args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, **options: Any) -> Any:
            request = {"argv": list(args), "env": dict(env), "cwd": os.getcwd(), "umask": umask}
            worker = self._one(request, stdout, stderr)
            return worker or start(args=args, env=env, stdout=stdout, stderr=stderr, **options)

        module.Popen = popen  # type: ignore[attr-defined]
        self._deadline = time.monotonic() + ANSWER_S

    def _one(self, request: Mapping[str, Any], stdout: Any, stderr: Any) -> Any:
        """Return a spare's process that has become the worker; None if no spare can."""
        while self._spares:
            try:
                return self._spares.pop(0).become(request, stdout.fileno(), stderr.fileno(), self._deadline)
            except Exception as error:
                # torchrun's handler of SIGTERM raises this (torch/distributed/elastic/multiprocessing/api.py, 2.13).
                if type(error).__name__ == "SignalException":
                    raise
                self._say(in_words(error))
        if not self._said:
            self._say("no spare was ready")
        return None

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            sys.stderr.write(f"A worker starts cold: {why}.\n")
