"""Tasks of the loop that nobody awaits, when it looks at what no event tells, and the ends of any processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from ..gang.cause import describe_exit
from ..machine import processes

WATCH_S = 0.5
"""Seconds between two looks at what no event tells."""
_LOOK_S, _LOOK_FOR_SURE_S = 0.25, 60.0  # at a process, without a pidfd, and with one


def until_look(period_s: float = WATCH_S) -> float:
    """Return how many seconds are left until the next look, more than 0.

    Parts that use this, with periods that divide each other, wake up together. Waking up costs more than most looks do
    (0.4 ms of CPU on an idle machine), and the cores belong to the workers.
    """
    return period_s - time.monotonic() % period_s


class Held:
    """Holds tasks, since asyncio holds them weakly, and has the loop told at once what one raises."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": "a task has failed", "exception": error})

    def cancel(self) -> None:
        """End all of them."""
        for each in list(self._tasks):
            each.cancel()


async def end_of(process: processes.Process) -> str:
    """Wait for the end of a process; return how it ended, in words."""
    loop, told, pidfd = asyncio.get_running_loop(), asyncio.Event(), processes.open_pidfd(process.pid)
    if pidfd is not None:
        loop.add_reader(pidfd, told.set)
    try:
        while not process.has_ended:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(told.wait(), _LOOK_S if pidfd is None else _LOOK_FOR_SURE_S)
    finally:
        if pidfd is not None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    now = process.now()
    # None: somebody has waited for it already.
    return "ended" if now is None or now.status is None else describe_exit(now.status)
