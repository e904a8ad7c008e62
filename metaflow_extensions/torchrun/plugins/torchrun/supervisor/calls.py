"""Counts the workers' calls of `metaflow_torchrun.stopping`, and tells them at which one to stop.

Each worker shares a page of memory with this process. It counts its calls there, and reads its order: to go on, to wait in
its next call until that of all ranks is known, or the call at which it stops.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from .progress_observer import metrics_folder
from .workers import Workers

# A page: three numbers of 64 bits, written by the worker, by us, by the worker. `stopping` has the same.
_CALLS, _ORDER, _WAITS_IN = range(3)
_WAIT = 2**63
# A worker writes its call before it reads its order. So much later we see both, and whether it waits.
_SETTLE_S = 0.05


class CallCounts:
    """The pages of one generation on this node."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        folder = metrics_folder(workers.folder)
        self._pages: dict[int, memoryview] = {}  # by global rank; none where there was no room on the disk
        for local_rank, rank in enumerate(workers.call.ranks):
            path = os.path.join(folder, f"{local_rank}.calls")
            try:
                with open(path, "w+b") as file:
                    # On a full disk, a hole in a file kills who touches it.
                    os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
                    self._pages[rank] = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")
            except OSError:  # this rank can't be told to stop, and trains
                with suppress(OSError):
                    os.unlink(path)

    def calling(self) -> list[int]:
        """Return the ranks that run and have called it."""
        return [rank for rank, page in self._pages.items() if page[_CALLS] and rank not in self._workers.codes]

    def hold(self, needs_all: bool) -> Coroutine[Any, Any, int]:
        """Have the ranks that call it wait in their next call, at once; return what finds out the last of these calls.

        If it `needs_all`, none waits where one that runs has never called it.
        """
        calling = self.calling()
        if needs_all and len(calling) < len(set(self._workers.call.ranks) - self._workers.codes.keys()):
            calling = []
        pages = [self._pages[rank] for rank in calling]
        for page in pages:
            if not page[_ORDER]:
                page[_WAITS_IN] = 0  # of an order before, which stopped nothing
                page[_ORDER] = _WAIT
        return _last_call(pages)

    def stop_at(self, call: int) -> None:
        """Have all ranks that wait go on: to this call, where they stop; 0: as if nothing had been."""
        for page in self._pages.values():
            if page[_ORDER] == _WAIT:
                page[_ORDER] = call

    def have_stopped(self) -> bool:
        """Return whether a rank has come to the call at which it stops."""
        return any(0 < page[_ORDER] <= page[_CALLS] for page in self._pages.values())


async def _last_call(pages: list[memoryview]) -> int:
    """Return the last of these ranks' next calls, or 0 if none waits."""
    await asyncio.sleep(_SETTLE_S)
    return max(map(_next_call, pages), default=0)


def _next_call(page: memoryview) -> int:
    """Return the call at which a rank can stop first: the one in which it waits, or else the next one."""
    if page[_ORDER] != _WAIT:
        return page[_ORDER]
    return page[_CALLS] + (page[_WAITS_IN] != page[_CALLS])
