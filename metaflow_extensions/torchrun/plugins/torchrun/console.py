"""Writing to the task's own stdout and stderr so that Metaflow's terminal shows whole lines, at once.

Two things are in the way on a local run, where all nodes write to the pipe of the control task:

- A write of more than ``PIPE_BUF`` bytes is not atomic, so lines of two nodes could mix. The writers
  therefore take turns, by a lock on the pipe itself.
- Metaflow's local runtime (``Worker.read_logline`` in ``metaflow/runtime.py``, 2.19) reads one line from a
  buffered file each time the pipe has something to read. Of lines that arrive together it shows the
  first; the others sit in its buffer, out of the poll's sight, until the next write. So, while the
  output is a trickle, a line is written only when the reader has taken the one before. A flood is
  written at once: there the next write is never far.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
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
_LOOK_S = 0.0001

# Pipe's inode -> descriptor of its own for the lock, kept as long as the process lives.
_lock_fds: dict[int, int] = {}
_thread_lock = threading.Lock()


def write_output(stream: str, text: str) -> None:
    """Write whole lines of workers' output to the task's own stream.

    Parameters
    ----------
    stream : str
        ``"stdout"`` or ``"stderr"``.
    text : str
        Lines, the last one ended too.
    """
    target = sys.stdout if stream == "stdout" else sys.stderr
    pipe = _pipe_inode(target)
    if pipe is None:
        _write_encoded(target, text)
        return
    patient = text.count("\n") <= _TRICKLE_LINES
    for piece in re.findall(r"[^\n]*\n", text) if patient else [text]:
        with _turn(target, pipe):
            patient = patient and _await_reader(target)
            _write_all(target, piece)


def _write_all(target: TextIO, text: str) -> None:
    """Write past Python's own layers: unbuffered, they drop the rest of a write that a signal cuts short."""
    target.flush()
    data = memoryview(text.encode("utf-8", errors="replace"))
    while data:
        data = data[os.write(target.fileno(), data) :]


def _write_encoded(target: TextIO, text: str) -> None:
    """Write what the stream's encoding has no character for as an escape, rather than not at all."""
    encoding = target.encoding or "utf-8"
    target.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
    target.flush()


def _pipe_inode(target: TextIO) -> int | None:
    try:
        status = os.fstat(target.fileno())
    except (OSError, ValueError):  # replaced by something without a file, as in a notebook
        return None
    return status.st_ino if stat.S_ISFIFO(status.st_mode) else None


@contextlib.contextmanager
def _turn(target: TextIO, pipe: int) -> Iterator[None]:
    """Hold the pipe's lock where there is one; after some patience go on without."""
    with _thread_lock:  # the pipe's lock is the process's
        fd = _lock_fd(target, pipe)
        yield from _with_lock(fd)


def _with_lock(fd: int | None) -> Iterator[None]:
    deadline = time.monotonic() + _TURN_PATIENCE_S
    held = False
    while fd is not None and not held and time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
            break
        time.sleep(_LOOK_S)
    try:
        yield
    finally:
        if fd is not None and held:
            fcntl.flock(fd, fcntl.LOCK_UN)


def _lock_fd(target: TextIO, pipe: int) -> int | None:
    """Return a descriptor of our own: locks of an inherited one would be shared with the other nodes."""
    if pipe not in _lock_fds:
        with contextlib.suppress(OSError):  # no /proc: then lines of two nodes can mix, as any programs' can
            _lock_fds[pipe] = os.open(f"/proc/self/fd/{target.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return _lock_fds.get(pipe)


def _await_reader(target: TextIO) -> bool:
    """Wait until the pipe is empty; return False if the reader takes too long."""
    deadline = time.monotonic() + _READER_PATIENCE_S
    while _unread_bytes(target):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _unread_bytes(target: TextIO) -> int:
    try:
        count: int = struct.unpack("i", fcntl.ioctl(target.fileno(), termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:  # not on this system: then lines come when they come
        return 0
    return count
