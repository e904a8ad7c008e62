"""The task's end of the link to its supervisor: a socket, and frames of JSON in both directions.

`LinkEnd.run` reads and writes in one thread. Any other thread may call `send`, also from within a signal handler: it
only puts into a queue and wakes that thread. So no handler that raises can cut a frame in two. Both ends are of
the same version and on one machine, so a frame has no limit and is not checked.
"""

from __future__ import annotations

import queue
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .codec import Frames, frame

_CHUNK_BYTES = 256 * 1024


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
        self._frames = Frames()
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

    def run(self, handle: Callable[[Any], None], is_over: Callable[[], bool], look_s: float = 5.0) -> None:
        """Handle all frames, until the other end is gone or `is_over`, which is asked after each event.

        Without any event it asks every `look_s` seconds.
        """
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        try:
            while not is_over():
                poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._has_unsent() else 0))
                ready = dict(poll.poll(1000 * look_s))
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

    def _read(self, handle: Callable[[Any], None]) -> bool:
        """Handle what has come; return False at the end."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for each in self._frames.feed(data):
            handle(each)
        return bool(data)

    def close(self) -> None:
        """Close it; call it when `run` has returned or was never called."""
        self._is_over = True
        for each in (self._socket, self._woken, self._wake):
            with suppress(OSError):  # the step's code has closed all descriptors
                each.close()
