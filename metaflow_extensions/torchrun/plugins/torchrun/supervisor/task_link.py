"""The supervisor's end of the connection to its task; `task/link` is the task's.

No asyncio transport: that stops reading at the first write that fails, and the last words of a task that was killed, as
its *leave*, would be lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import signal
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..machine.packets import MOST_BYTES, Packets, packets
from ..machine.processes import send_signal

_FLUSH_S = 5.0
_LOOK_S, _LONGEST_PAUSE_S = 0.01, 1.0  # between two signals of a task that does not read


class TaskLink:
    """A connection to the task `pid`. `handle` gets each frame; `on_end` is called at its end.

    A fork of the task may hold the other end open, so its end alone does not tell that the task has ended.
    """

    def __init__(
        self,
        own: socket.socket,
        pid: int,
        handle: Callable[[list[Any]], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        own.setblocking(False)
        self._socket, self._pid, self._handle, self._on_end = own, pid, handle, on_end
        self._come, self._numbers = Packets(), itertools.count()
        self._unsent: deque[bytes] = deque()
        self._is_waking = False

    def open(self) -> None:
        """Begin to read; call it in the loop."""
        asyncio.get_running_loop().add_reader(self._socket, self._read_or_end)

    def send(self, *data: Any) -> None:
        """Send a frame; dropped if the other end is gone. The task reads it when it next waits for something."""
        is_writing = bool(self._unsent)
        self._unsent.extend(packets(next(self._numbers), data))
        if not is_writing:
            self._write()

    def send_now(self, *data: Any) -> None:
        """Send a frame, and signal the task until it has read it: the step's own code may run."""
        # SIGURG is ignored by default, so it harms no process whose handlers the step's code has reset.
        self.send(*data)
        if not self._is_waking:
            self._is_waking = True
            self._wake(_LOOK_S)

    def _wake(self, pause_s: float) -> None:
        self._is_waking = self._has_unread()
        if self._is_waking:
            send_signal(self._pid, signal.SIGURG)
            asyncio.get_running_loop().call_later(pause_s, self._wake, min(2 * pause_s, _LONGEST_PAUSE_S))

    def _has_unread(self) -> bool:
        """Return whether the task has not read all, as the kernel counts it (``unix_ioctl``)."""
        try:
            (count,) = struct.unpack("i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
        except OSError:  # its end is gone
            count = 0
        return bool(self._unsent) or count > 0

    def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            with suppress(BlockingIOError):
                while self._unsent:
                    self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
                    self._unsent.popleft()
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
            packet = self._socket.recv(MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if packet and (frame := self._come.add(packet)) is not None:
            self._handle(frame)
        return packet

    def read_rest(self) -> None:
        """Handle what has come by now: the task is gone."""
        while self._read():
            pass
