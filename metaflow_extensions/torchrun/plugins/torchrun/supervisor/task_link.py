"""The supervisor's end of the connection to its task; `channel/link` is the task's.

No asyncio transport: that stops reading at the first write that fails, and the last words of a task that was killed, as
its *leave*, would be lost.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..channel.codec import Frames, frame

_FLUSH_S = 5.0
_LOOK_S = 0.01
_CHUNK_BYTES = 256 * 1024


class TaskLink:
    """The connection. `handle` gets each frame; `on_end` is called at its end.

    A fork of the task may hold the other end open, so its end alone does not tell that the task has ended.
    """

    def __init__(self, own: socket.socket, handle: Callable[[list[Any]], None], on_end: Callable[[], None]) -> None:
        own.setblocking(False)
        self._socket, self._handle, self._on_end = own, handle, on_end
        self._frames = Frames()
        self._unsent = bytearray()

    def open(self) -> None:
        """Begin to read; call it in the loop."""
        asyncio.get_running_loop().add_reader(self._socket, self._read_or_end)

    def send(self, *data: Any) -> None:
        """Send a frame; dropped if the other end is gone."""
        is_writing = bool(self._unsent)
        self._unsent += frame(data)
        if not is_writing:
            self._write()

    def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            with suppress(BlockingIOError):
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_NOSIGNAL)]
        except OSError:  # its end is read
            self._unsent.clear()
        if self._unsent:
            loop.add_writer(self._socket, self._write)
        else:
            loop.remove_writer(self._socket)

    async def flush(self, is_over: Callable[[], bool]) -> None:
        """Wait until all is sent, some seconds at most, or until nobody takes it any more."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _FLUSH_S
        while self._unsent and not is_over() and loop.time() < deadline:
            await asyncio.sleep(_LOOK_S)

    def _read_or_end(self) -> None:
        if self._read() == b"":
            asyncio.get_running_loop().remove_reader(self._socket)
            self._on_end()

    def _read(self) -> bytes | None:
        """Handle what has come, and return it: nothing at the end, and None where nothing has come."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        for each in self._frames.feed(data):
            self._handle(each)
        return data

    def read_rest(self) -> None:
        """Handle what has come by now: the task is gone."""
        while self._read():
            pass
