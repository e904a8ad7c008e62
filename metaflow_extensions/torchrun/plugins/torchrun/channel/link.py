"""The task's end of the link to its supervisor: a socket that keeps packets whole, and no thread.

Who waits for something reads meanwhile; the handler of the wake signal reads while the step's own code runs. Any
thread may use it, and so may signal handlers, which may also raise out of it at any place. So a packet is read and kept
in one call into C, and sent and dropped in another one. A frame that has come is dropped only after it was handled: at
worst it is handled twice.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import Any

from ..machine import native
from ..machine.wake import unread_bytes
from .codec import PACKET_BYTES, first_frame, packets

_ROOM_S = 0.2  # between two looks while the other end takes nothing
_STUCK_S = 60.0  # then it is taken for gone
_TURN_S = 0.01  # for another thread that handles what has come
_CLOSED = "its code has closed the connection to its supervisor process, as os.closerange(3, …) does"


class LinkEnd:
    """A socket to the other end. `handle` gets each frame.

    `on_stuck` is called while the other end takes nothing, and returns whether it never will.
    """

    def __init__(self, own: native.socket, handle: Callable[[Any], None], on_stuck: Callable[[], bool]) -> None:
        own.setblocking(False)
        self._socket, self._handle, self._on_stuck = own, handle, on_stuck
        self._file = os.fstat(own.fileno()).st_ino  # the step's code may close it, and get its number for another file
        self._waiting: deque[bytes] = deque()  # packets that have not gone yet
        self._come: deque[bytes] = deque()  # packets whose frames were not handled yet
        # Held while packets are sent, and while frames are handled. A signal handler leaves the work to who holds it, and has
        # `on_missed` called then. Python 3.10 may leave it locked where two handlers raise at the same moment.
        self._turn = native.allocate_lock()
        self._is_missed = False
        self._is_cut = False  # whether a signal handler has raised, and may have left frames in `_come`
        self.on_missed: Callable[[], None] = lambda: None
        self._is_deaf = False  # whether the other end takes nothing any more; what it has said is read
        self._failed: str | None = None  # why the link can't go on; its end, when what has come is handled
        self.end: str | None = None  # why nothing is sent or read any more; empty if the other end is gone

    def send(self, *data: Any) -> None:
        """Send a frame, in the order of the calls; dropped if the other end is gone. It waits while that takes nothing."""
        if self.takes:
            self._waiting.extend(packets(data))  # one call into C
            self._take_turns(read=False)

    @property
    def takes(self) -> bool:
        """Whether the other end takes what is sent, as far as is known."""
        return self.end is None and not self._is_deaf

    def look(self) -> bool:
        """Handle what has come; return False if that is being done, and `on_missed` will be called after it."""
        if self._turn.locked():
            self._is_missed = True
        if self._turn.locked():  # still: so who holds it sees that when its turn is over
            return False
        self._take_turns(read=True)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has come, or so long, and handle it; return whether something has come."""
        has_come = False
        if self.end is None:
            poll = native.poll()
            with suppress(ValueError):  # another thread has just closed it
                poll.register(self._socket, select.POLLIN)
                has_come = self._is_cut or bool(poll.poll(1000 * max(0.0, timeout_s)))
            if self._turn.locked():
                native.sleep(_TURN_S)
            self._take_turns(read=True)
        return has_come

    def close(self) -> None:
        """Close it, also for the forks of the task that have it."""
        self.end = self.end or ""
        with suppress(OSError):  # the step's code has closed all descriptors
            if os.fstat(self._socket.fileno()).st_ino == self._file:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._socket.close()
            else:
                self._socket.detach()

    def _take_turns(self, read: bool) -> None:
        while (read or self._waiting) and self.end is None and not self._turn.locked():
            was_cut = self._is_cut
            try:
                with self._turn:
                    if read:
                        self._read()
                        read = False
                    self._write()
            except BaseException:  # nobody else says that frames have come
                self._is_cut = True
                # Once only: a frame that raises each time is a bug of ours.
                self._is_missed = self._is_missed or not was_cut
                raise
            finally:
                if self._is_missed:
                    self._is_missed = False
                    self.on_missed()

    # --- while `_turn` is held

    def _write(self) -> None:
        stuck_s, seen = 0.0, None
        while self._waiting and self.end is None:
            first = iter(partial(self._waiting.__getitem__, 0), None)
            sent = map(self._socket.send, first, repeat(socket.MSG_NOSIGNAL))
            try:
                self._check_file()
                with suppress(IndexError):  # all are sent
                    # In C as a whole: a packet is dropped as soon as it is sent, and before any handler runs.
                    deque(zip(sent, iter(self._waiting.popleft, None), strict=False), maxlen=0)
            except BlockingIOError:
                before, seen = seen, (id(self._waiting[0]), unread_bytes(self._socket.fileno()))
                # Seconds of the clock would count while all processes are stopped.
                stuck_s = 0.0 if self._has_room() or seen != before else stuck_s + _ROOM_S
                if self._on_stuck():
                    self._stop_sending()
                elif stuck_s > _STUCK_S:
                    self._stop_sending(f"its supervisor process takes nothing for {_STUCK_S:g} s")
            except (BrokenPipeError, ConnectionResetError):
                self._stop_sending()
            except OSError as error:
                self._stop_sending(_words(error))

    def _has_room(self) -> bool:
        poll = native.poll()
        with suppress(ValueError):  # another thread has just closed it
            poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(1000 * _ROOM_S))

    def _stop_sending(self, why: str | None = None) -> None:
        self._is_deaf = True
        self._failed = self._failed or why
        self._waiting.clear()

    def _read(self) -> None:
        self._is_cut = False
        try:
            self._check_file()
            for _ in range(2):  # an end that has not read all that we said is first told as an error
                with suppress(BlockingIOError, ConnectionResetError):
                    # In C as a whole, so that no handler runs between a packet's reading and its keeping.
                    self._come.extend(iter(partial(self._socket.recv, PACKET_BYTES + 1), b""))
                    self._failed = self._failed or ""
        except OSError as error:
            self._failed = self._failed or _words(error)
        while (found := first_frame(self._come)) is not None:
            value, count = found
            self._handle(value)
            for _ in range(count):
                self._come.popleft()
        if self.end is None:
            self.end = self._failed

    def _check_file(self) -> None:
        if os.fstat(self._socket.fileno()).st_ino != self._file:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _words(error: OSError) -> str:
    return _CLOSED if error.errno == errno.EBADF else f"the connection to its supervisor process has failed: {error}"
