"""Does what a disk or a name server may hold up, so that nobody else is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

STUCK_S = 5.0  # for what a disk that works has at once
_MOMENT_S = 0.2  # more than an answer takes; only a job that hangs costs its caller so much


class Aside:
    """Does one job at a time, in a daemon thread. Who calls it goes on without the job while another one hangs."""

    def __init__(self, name: str = "torchrun-files") -> None:
        self._name, self._job = name, Future[Any]()
        self._job.set_result(None)

    def begin(self, work: Callable[..., T], *args: Any) -> Future[T] | None:
        """Begin a job, and give it a moment; None while another goes on, or where no thread can start."""
        job = Future[T]()

        def do() -> None:
            try:
                job.set_result(work(*args))
            except BaseException as error:
                job.set_exception(error)

        if not self._job.done():
            return None
        try:
            threading.Thread(target=do, name=self._name, daemon=True).start()
        except RuntimeError:
            return None
        self._job = job
        wait([job], _MOMENT_S)
        return job

    async def within(self, limit_s: float, work: Callable[..., T], *args: Any) -> T:
        """Return what `work` returns, when its turn has come; raise TimeoutError without an answer by then."""
        deadline, job = time.monotonic() + limit_s, self.begin(work, *args)
        while job is None or not job.done():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the disk of TMPDIR has not answered for {limit_s:g} s")
            await asyncio.sleep(_MOMENT_S)
            job = job or self.begin(work, *args)
        return job.result()
