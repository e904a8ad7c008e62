"""Tasks of the loop that nobody awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Held:
    """Holds them, since asyncio holds tasks weakly, and has the loop told at once what one raises."""

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
