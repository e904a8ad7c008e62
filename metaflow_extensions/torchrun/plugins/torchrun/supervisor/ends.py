"""Tasks of the loop that nobody awaits, and the ends of processes that need be no children of this one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from ..gang.cause import describe_exit
from ..machine import processes

_LOOK_S, _LOOK_FOR_SURE_S = 0.25, 60.0  # without a pidfd, and with one


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


async def end_of(process: processes.Other) -> str:
    """Wait for the end of a process; return how it ended, in words."""
    loop, told, pidfd = asyncio.get_running_loop(), asyncio.Event(), None
    with suppress(ProcessLookupError):
        pidfd = processes.open_pidfd(process.pid)
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
    now = processes.find(process.pid)
    if now is None or now.began != process.began or now.status is None:  # somebody has waited for it already
        return "ended"
    return describe_exit(now.status)
