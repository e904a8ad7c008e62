"""At which call of `metaflow_torchrun.stopping` the loops of this node's workers are, and where they shall stop.

Each worker shares a page of memory with this process. It counts its calls there, and reads its order: to go on, to wait in
its next call, or the call at which all ranks stop. No rank waits for another one, so none can be the missing one.
"""

from __future__ import annotations

import asyncio
import mmap
import os

from ..gang.wire import Plain
from .progress_observer import metrics_folder
from .workers import Workers

# A page: three numbers of 64 bits, written by the worker, by us, by the worker. `stopping` has the same.
_CALLS, _ORDER, _WAITS_IN = range(3)
_WAIT = 2**63
# A worker that has read its order before we wrote it has written its call by then: processors delay a write by less than
# a microsecond, Python's next instruction by less than this, even where the worker has lost the CPU.
_SETTLE_S = 0.05


class CallCounts:
    """The pages of one generation on this node."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        folder = metrics_folder(workers.folder)
        os.makedirs(folder, exist_ok=True)
        self._pages: dict[int, memoryview] = {}  # by global rank
        for local_rank, rank in enumerate(workers.call.ranks):
            with open(os.path.join(folder, f"{local_rank}.calls"), "w+b") as file:
                os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)  # on a full disk a hole would kill who touches it
                self._pages[rank] = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")

    def calling(self) -> list[int]:
        """Return the ranks that run and have called it."""
        return [rank for rank, page in self._pages.items() if page[_CALLS] and rank not in self._workers.codes]

    async def hold(self, needs_all: bool) -> Plain:
        """Have the ranks that call it wait in their next call; return the last of these calls, or 0 if none waits.

        If it `needs_all`, none waits where one that runs has never called it.
        """
        calling = self.calling()
        if needs_all and len(calling) < len(self._pages.keys() - self._workers.codes):
            calling = []
        pages = [self._pages[rank] for rank in calling]
        for page in pages:
            page[_ORDER] = page[_ORDER] or _WAIT
        await asyncio.sleep(_SETTLE_S)
        return {"next": max(map(_next_call, pages), default=0)}

    def stop_at(self, call: int) -> None:
        """Have all ranks that wait go on: to this call, where they stop; 0: as if nothing had been."""
        for page in self._pages.values():
            if page[_ORDER] == _WAIT:
                page[_ORDER] = call


def _next_call(page: memoryview) -> int:
    """Return the call at which a rank can stop first: the one in which it waits, or else the next one."""
    if page[_ORDER] != _WAIT:
        return page[_ORDER]
    return page[_CALLS] + (page[_WAITS_IN] != page[_CALLS])
