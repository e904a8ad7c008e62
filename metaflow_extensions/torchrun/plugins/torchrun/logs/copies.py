"""Keeps what workers write in files, too, where a user asks for that (`log_dir`).

Their disk may be slow, or gone for minutes, so one thread writes them; it is there only with such files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_BEHIND_BYTES = 8 * 1024 * 1024  # with so much unwritten, workers are kept waiting


class Copy:
    """One file. `write` returns at once; `say` is called in the loop if the file can't be written any more."""

    def __init__(self, copies: Copies, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._copies, self._path = copies, path
        self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`

    def write(self, data: bytes) -> None:
        """Have data written."""
        self._copies.submit(len(data), self._write, data)

    def close(self) -> None:
        """Have the file closed, when all is written."""
        self._copies.submit(0, self._close)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left and self._file is not None:  # a disk that fills up takes a part
                left = left[self._file.write(left) :]
        except OSError as error:
            self._close()
            self._copies.say(
                f"{self._path} can't be written any more, and lacks what follows: {error.strerror or error}"
            )

    def _close(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()


class Copies:
    """All such files of one generation, and the thread that writes them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pool = ThreadPoolExecutor(1, "torchrun-copies")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._put_bytes = self._written_bytes = 0  # the second belongs to the thread
        self._last: Future[None] | None = None

    def start(self) -> None:
        """Begin; call it in the loop."""
        self._loop = asyncio.get_running_loop()

    def submit(self, count: int, work: Callable[..., None], *args: bytes) -> None:
        """Have work done in its turn, which writes so many bytes."""
        self._put_bytes += count
        self._last = self._pool.submit(self._work, count, work, *args)

    def _work(self, count: int, work: Callable[..., None], *args: bytes) -> None:
        work(*args)
        self._written_bytes += count

    def say(self, text: str) -> None:
        """Say something; called in the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._say, text)

    @property
    def is_behind(self) -> bool:
        """Whether so much is unwritten that its source should wait."""
        return self._put_bytes - self._written_bytes >= _BEHIND_BYTES

    def end(self) -> None:
        """End the thread when all is written."""
        self._pool.shutdown(wait=False)

    async def finish(self, limit_s: float | None) -> None:
        """Wait until all is written, so long at most."""
        if self._last is not None:
            await asyncio.wait([asyncio.wrap_future(self._last)], timeout=limit_s)
