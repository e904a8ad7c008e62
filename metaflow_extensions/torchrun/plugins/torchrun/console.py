"""Writing to the task's own stdout and stderr so that Metaflow's terminal shows whole lines, at once.

Two things are in the way on a local run, where all nodes write to the pipe of the control task:

- A write of more than ``PIPE_BUF`` bytes is not atomic, so lines of two nodes could mix. The writers
  therefore take turns, by a lock on the pipe itself.
- Metaflow's local runtime (``Worker.read_logline`` in ``metaflow/runtime.py``, 2.19) reads one line from a
  buffered file each time the pipe has something to read. Of lines that arrive together it shows the
  first; the others sit in its buffer, out of the poll's sight, until the next write. So, while the
  output is a trickle, a line is written only when the reader has taken the one before. A flood is
  written at once: there the next write is never far.

A reader may stop to read for a while (a paused terminal), or for ever; the stream may be non-blocking, as
some programs leave it, or closed. So nobody writes before there is room, all text waits its turn in one
queue for each stream, and whoever has the turn writes for those that could not wait.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import fcntl
import io
import os
import re
import select
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import TextIO

_TRICKLE_LINES = 200  # in one go; a reader that takes 0.2 ms a line is through in 40 ms
_READER_PATIENCE_S = 0.05  # with a reader that does not read; it is not waited for a second time
_TURN_PATIENCE_S = 1.0  # with a writer that holds the lock, for example one that was stopped
_STUCK_S = 3.0  # with a reader that takes nothing at all
_LOOK_S = (0.0001, 0.005)  # first and longest pause between looks
_PIECE_BYTES = select.PIPE_BUF  # so much can be written where there is room for anything, without waiting


def write_output(stream: str, text: str, patience_s: float = _STUCK_S) -> bool:
    """Write whole lines to the task's own stream; any thread may.

    Nothing is lost while somebody can read the stream: what is not taken in time is written before the next
    text, by whoever writes that, or at the process's end. Where nobody can, it is dropped, and said once.

    Parameters
    ----------
    stream : str
        ``"stdout"`` or ``"stderr"``.
    text : str
        Lines, the last one ended too; may be empty.
    patience_s : float
        How many seconds to wait for a reader that takes nothing.

    Returns
    -------
    bool
        Whether all is written; False if the reader has taken nothing for so long.
    """
    return _outputs[stream].write(text, patience_s)


class _Output:
    """One of the two streams, and what waits to be written there."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Anybody adds on the right, at any time; only who holds the turn takes from the left.
        self._waiting: collections.deque[str] = collections.deque()
        self._turn = threading.Lock()
        self._cut = b""  # the rest of what was begun; the turn's, as all below
        self._lock_fds: dict[int, int] = {}  # pipe's inode -> descriptor for its lock, kept while the process lives
        self._lock_patience_s = _TURN_PATIENCE_S
        self._said_lost = False

    def write(self, text: str, patience_s: float) -> bool:
        if text:
            self._waiting.append(text)
        if not self._turn.acquire(timeout=patience_s):
            return False  # who has the turn writes ours, too
        try:
            return self._write_waiting(patience_s)
        finally:
            self._turn.release()

    def _write_waiting(self, patience_s: float) -> bool:
        while self._cut or self._waiting:
            target: TextIO | None = getattr(sys, self._name)
            text = "" if self._cut else self._waiting.popleft()
            try:
                self._write_text(target, text, patience_s)
            except Exception as error:  # of a stream that the step's code has put there, it can be any
                self._cut = b""
                self._say_lost(error)
            if self._cut:
                return False
        return True

    def _write_text(self, target: TextIO | None, text: str, patience_s: float) -> None:
        """Write `text`, or else the rest of the one before; what the reader does not take is the next rest."""
        if target is None:  # closed before Python began
            raise OSError(f"there is no {self._name}")
        fd = _descriptor(target)
        if fd is None:
            text, self._cut = self._cut.decode(errors="replace") + text, b""
            _write_encoded(target, text)
            return
        kind = os.fstat(fd)
        is_pipe = stat.S_ISFIFO(kind.st_mode)
        _flush(target, fd, is_pipe)
        if not is_pipe:
            # Of a file on a disk no piece has to wait, so all goes in one.
            piece_bytes = sys.maxsize if stat.S_ISREG(kind.st_mode) else _PIECE_BYTES
            self._cut = _write_all(fd, self._cut or _encoded(target, text), patience_s, piece_bytes)
            return
        patient = text.count("\n") <= _TRICKLE_LINES
        pieces = re.findall(r"[^\n]*\n", text) if patient and not self._cut else [text]
        for number, piece in enumerate(pieces):
            with self._lock(fd, kind.st_ino):
                patient = patient and _await_reader(fd)
                self._cut = _write_all(fd, self._cut or piece.encode(errors="replace"), patience_s, _PIECE_BYTES)
            if self._cut:
                self._waiting.extendleft(reversed(pieces[number + 1 :]))
                return

    def _say_lost(self, error: Exception) -> None:
        if not self._said_lost:
            self._said_lost = True
            other = "stderr" if self._name == "stdout" else "stdout"
            text = f"[torchrun] {self._name} can't be written to ({error}): what the workers write there is lost\n"
            write_output(other, text, 0.0)

    @contextlib.contextmanager
    def _lock(self, target_fd: int, pipe: int) -> Iterator[None]:
        """Hold the pipe's lock where there is one; after some patience go on without."""
        fd = self._lock_fd(target_fd, pipe)
        held = fd is not None and self._take_lock(fd)
        # A holder that was stopped keeps it for long; each line would wait for it.
        self._lock_patience_s = _TURN_PATIENCE_S if held else 0.0
        try:
            yield
        finally:
            if fd is not None and held:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)

    def _take_lock(self, fd: int) -> bool:
        for _ in _looks(self._lock_patience_s):
            with contextlib.suppress(
                OSError
            ):  # somebody has it; or the step's code has closed all that it did not know
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        return False

    def _lock_fd(self, target_fd: int, pipe: int) -> int | None:
        """Return a descriptor of our own: locks of one that others have, too, would be shared with them."""
        if pipe not in self._lock_fds:
            with contextlib.suppress(OSError):  # no /proc: then lines of two nodes can mix, as any programs' can
                fd = os.open(f"/proc/self/fd/{target_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                # Not the number of a standard stream that somebody has closed: what is meant for it would go here.
                self._lock_fds[pipe] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
                os.close(fd)
        return self._lock_fds.get(pipe)

    def close(self) -> None:
        """Give the locks back that this process has, or that its parent has and it has got with them."""
        for fd in self._lock_fds.values():
            with contextlib.suppress(OSError):
                os.close(fd)


_outputs = {name: _Output(name) for name in ("stdout", "stderr")}


def _begin_anew() -> None:
    """Leave a forked child nothing of what its parent is still to write, and none of its locks."""
    for name, output in _outputs.items():
        output.close()
        _outputs[name] = _Output(name)


os.register_at_fork(after_in_child=_begin_anew)


@atexit.register
def _write_the_rest() -> None:
    for name in _outputs:
        write_output(name, "")


def _descriptor(target: TextIO) -> int | None:
    """Return the file descriptor of a stream of Python's own kind.

    One that somebody else has put there, as a notebook or a tee, may have one as well, but wants the text.
    """
    with contextlib.suppress(OSError, ValueError):
        return target.fileno() if isinstance(target, io.TextIOWrapper) else None
    return None


def _flush(target: TextIO, fd: int, is_pipe: bool) -> None:
    """Let what others have printed go first, if there is room for it: here nobody may be made to wait."""
    if _await_room(fd, 0.0) and not (is_pipe and _unread_bytes(fd)):
        with contextlib.suppress(BlockingIOError):  # it keeps what it could not write, for the next time
            target.flush()


def _write_all(fd: int, data: bytes, patience_s: float, piece_bytes: int) -> bytes:
    """Write as long as there is room, or comes in time; return the rest.

    This goes past Python's own layers: unbuffered, they drop the rest of a write that a signal cuts short.
    """
    rest = memoryview(data)
    while rest and _await_room(fd, patience_s):
        end = len(rest) if len(rest) <= piece_bytes else bytes(rest[:piece_bytes]).rfind(b"\n") + 1
        with contextlib.suppress(BlockingIOError):  # somebody else was faster
            rest = rest[os.write(fd, rest[: end or piece_bytes]) :]
    return bytes(rest)


def _await_room(fd: int, patience_s: float) -> bool:
    """Wait until something can be written, or an error can be had."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(patience_s * 1000))


def _write_encoded(target: TextIO, text: str) -> None:
    target.write(_encoded(target, text).decode(_encoding(target)))
    target.flush()


def _encoded(target: TextIO, text: str) -> bytes:
    """Encode what the stream's encoding has no character for as an escape, rather than not at all."""
    return text.encode(_encoding(target), errors="backslashreplace")


def _encoding(target: TextIO) -> str:
    return getattr(target, "encoding", None) or "utf-8"


def _await_reader(fd: int) -> bool:
    """Wait until the pipe is empty; return False if the reader takes too long."""
    return any(_unread_bytes(fd) == 0 for _ in _looks(_READER_PATIENCE_S))


def _looks(patience_s: float) -> Iterator[None]:
    """Yield at once, and again after growing pauses while there is patience."""
    deadline, (pause, longest) = time.monotonic() + patience_s, _LOOK_S
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 1.2, longest)
        yield


def _unread_bytes(fd: int) -> int:
    try:
        count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:  # not on this system: then lines come when they come
        return 0
    return count
