"""One end of the link between a task and its supervisor: a socket, and frames of JSON in both directions.

`LinkEnd.run` reads and writes in one thread. Any other thread may call `send`, also from within a signal handler: it
only puts into a queue and wakes that thread. So no handler that raises can cut a frame in two. Both ends are of
the same version and on one machine, so a frame has no limit and is not checked.
"""

from __future__ import annotations

import json
import queue
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from .frames import LENGTH

_CHUNK_BYTES = 256 * 1024
_FLUSH_S = 5.0


class Framer:
    """Bytes to frames, without any I/O."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the frames that are complete now."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            frame = json.loads(bytes(self._buffer[LENGTH.size : end]).decode("utf-8", "surrogatepass"))
            del self._buffer[:end]
            yield frame


def frame(data: Any) -> bytes:
    """Return the frame of plain data."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(text)) + text


class LinkEnd:
    """A socket to the other end; `run` belongs to one thread."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self._socket = own
        self._waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # No pipe: its number could be another file's once it is closed, while another thread is about to write to it.
        self._woken, self._wake = socket.socketpair()
        for each in (self._woken, self._wake):
            each.setblocking(False)
        self._unsent = b""
        self._framer = Framer()
        self._is_over = False

    def send(self, *data: Any) -> None:
        """Send a frame soon, in the order of the calls; dropped if the other end is gone."""
        if not self._is_over:
            self._waiting.put(frame(data))
            self.wake()

    def wake(self) -> None:
        """Have `run` look around."""
        with suppress(OSError):  # it is full, and so will wake; or it is closed
            self._wake.send(b"!", socket.MSG_NOSIGNAL)

    @property
    def waiting(self) -> int:
        """How many frames have not gone yet."""
        return self._waiting.qsize()

    def run(
        self,
        handle: Callable[[Any], None],
        is_over: Callable[[], bool] = lambda: False,
        others: Sequence[int] = (),
        look_s: float = 5.0,
    ) -> None:
        """Handle all frames, until the other end is gone or `is_over`, which is asked after each event.

        `others` are descriptors that wake it, too; without any event it asks every `look_s` seconds. What waits when
        it `is_over` is sent, if the other end takes it within some seconds.
        """
        poll, over_at = select.poll(), None
        for fd in (self._woken.fileno(), *others):
            poll.register(fd, select.POLLIN)
        try:
            while True:
                if over_at is None and is_over():
                    over_at = time.monotonic()
                if over_at is not None and (not self._has_unsent() or time.monotonic() > over_at + _FLUSH_S):
                    return
                poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._has_unsent() else 0))
                ready = dict(poll.poll(1000 * (look_s if over_at is None else _FLUSH_S / 10)))
                if over_at is not None and any(fd in ready for fd in others):
                    return  # the other end's process has ended, and takes nothing any more
                if self._woken.fileno() in ready:
                    self._woken.recv(4096)
                if events := ready.get(self._socket.fileno(), 0):
                    self._write()
                    if events & ~select.POLLOUT and not self._read(handle):
                        return
        finally:
            self._is_over = True

    def _has_unsent(self) -> bool:
        if not self._unsent:
            with suppress(queue.Empty):
                self._unsent = self._waiting.get_nowait()
        return bool(self._unsent)

    def _write(self) -> None:
        with suppress(OSError):  # its end is read
            while self._has_unsent():
                self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_NOSIGNAL) :]

    def read_rest(self, handle: Callable[[Any], None]) -> None:
        """Handle what has come by now; call it when `run` has returned, if the other end is gone."""
        while self._read(handle, if_nothing=False):
            pass

    def _read(self, handle: Callable[[Any], None], if_nothing: bool = True) -> bool:
        """Handle what has come; return False at the end, and `if_nothing` where nothing has come."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return if_nothing
        except OSError:
            return False
        for each in self._framer.feed(data):
            handle(each)
        return bool(data)

    def close(self) -> None:
        """Close it; call it when `run` has returned or was never called."""
        self._is_over = True
        for each in (self._socket, self._woken, self._wake):
            with suppress(OSError):  # the step's code has closed all descriptors
                each.close()
