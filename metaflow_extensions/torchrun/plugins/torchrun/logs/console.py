"""Writes whole lines to the task's own stdout and stderr, so that Metaflow's terminal shows them at once.

On a local run all nodes write to the pipe of the control task, one at a time: see `shared_pipe`.

A reader may pause (as a stopped terminal does), or never read again. The stream may be closed, or non-blocking, as
some programs leave it. So nothing is written before there is room. All text waits in one queue for each stream.
Any thread may write; the thread that holds `_turn` also writes the text of those that could not wait.

Metaflow (2.19) reads two pipes, and takes a line of the one and a line of the other in turns. So a text waits until
the other pipe is empty. And while one is written to stderr, no node writes to stdout: a traceback
stays in one piece.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import io
import os
import select
import stat
import sys
import threading
from typing import TextIO

from ..events import Event
from .shared_pipe import PipeLock, await_reader, await_room, unread_bytes

DEBUG = "METAFLOW_TORCHRUN_DEBUG"
"""Environment variable: ``1`` has the details written, too."""

_STUCK_S = 3.0  # for a reader that leaves no room
# The same for threads that log events; they must not wait long.
_EVENT_PATIENCE_S = 0.5
_OTHER_PATIENCE_S = 1.0  # for the reader of the other stream, while it reads nothing


def write_output(stream: str, lines: bytes, patience_s: float = _STUCK_S, more_follows: bool = False) -> bool:
    """Write whole lines of UTF-8 to stdout or stderr; return False if the reader has taken nothing for `patience_s`.

    Any thread may call it. Nothing is lost while the stream can be read: text that its reader did not take in time is
    written before the next text, or at the process's end. If the stream has no reader any more, text is dropped,
    and one line says so.
    With `more_follows`, the last line may wait for the next call, which must come soon, with lines or without. On stderr
    it never does: a block there is written whole.
    """
    return _outputs[stream].write(lines, patience_s, more_follows and stream == "stdout")


def write_text(stream: str, text: str, patience_s: float = _STUCK_S) -> bool:
    """Write whole lines, as `write_output` does."""
    return write_output(stream, text.encode(errors="backslashreplace"), patience_s)


def to_log(event: Event) -> None:
    """Write an event to the node's log, on stderr like Metaflow's own lines; details only with `DEBUG`."""
    if event.is_detail and os.environ.get(DEBUG, "") in ("", "0"):
        return
    text = "".join(f"[torchrun node {event.node}] {line}\n" for line in event.text.splitlines())
    write_text("stderr", text, _EVENT_PATIENCE_S)


class _Output:
    """One of the two streams, and what waits to be written there."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Any thread may append on the right at any time (deque.append is atomic). Only the thread that holds `_turn`
        # removes or puts back on the left, so texts keep their order.
        self._waiting: collections.deque[bytes] = collections.deque()
        self._turn = threading.Lock()
        # Only the thread that holds `_turn` may touch what follows.
        self._cut = b""  # the rest of what was begun
        self._pipe_lock = PipeLock()  # held from a line's first byte to its last, and from a text's first to its last
        self._other = "stderr" if name == "stdout" else "stdout"
        self._other_lock = PipeLock()  # of stdout, held while a text is written to stderr; never the other way round
        self._left_unread = sys.maxsize  # how many bytes stayed in the other pipe when its reader took nothing
        self._in_text = False  # whether the next text is the last line of the one before
        self._said_lost = False
        self._takes_turns = True  # whether it shares the pipe's lock with other nodes

    def write(self, lines: bytes, patience_s: float, more_follows: bool = False) -> bool:
        if lines:
            self._waiting.append(lines)
        if not self._turn.acquire(timeout=patience_s):
            return False  # the thread that holds `_turn` writes our text, too
        try:
            while self._cut or self._is_text_next(more_follows):
                if not self._write_next(patience_s):
                    return False
            return True
        finally:
            self._in_text = False
            self._let_others_write()
            self._turn.release()

    def finish(self) -> None:
        """Write what waits, at the process's end. Mixed lines of two nodes are better than lost ones."""
        if not self.write(b"", _STUCK_S):
            self._takes_turns = False
            self.write(b"", _STUCK_S)

    def _is_text_next(self, more_follows: bool) -> bool:
        if more_follows and len(self._waiting) == 1:
            return self._waiting[0].find(b"\n") < len(self._waiting[0]) - 1  # a single line is kept
        return bool(self._waiting)

    def _write_next(self, patience_s: float) -> bool:
        """Write the rest of what was begun, or the next text; return False if it has to wait."""
        try:
            return self._write_lines(b"" if self._cut else self._waiting.popleft(), patience_s)
        except Exception as error:  # a stream that the step's code has put there can raise anything
            self._cut = b""
            self._say_lost(error)
            return True
        finally:
            if not self._in_text:
                self._let_others_write()

    def _let_others_write(self) -> None:
        if not self._cut:
            self._pipe_lock.release()
            self._other_lock.release()

    def _write_lines(self, lines: bytes, patience_s: float) -> bool:
        """Write `lines`, or else the rest of those before; what the reader does not take is the next rest."""
        target: TextIO | None = getattr(sys, self._name)
        if target is None:  # closed before Python began
            raise OSError(f"there is no {self._name}")
        fd = _descriptor(target)
        if fd is None:
            text, self._cut = (self._cut + lines).decode(errors="replace"), b""
            encoding = getattr(target, "encoding", None) or "utf-8"
            target.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
            target.flush()
            return True
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        _flush(target, fd, is_pipe)
        if is_pipe:
            return self._write_to_pipe(fd, lines, patience_s)
        self._cut = _write_all(fd, self._cut or lines, patience_s)
        return not self._cut

    def _write_to_pipe(self, fd: int, lines: bytes, patience_s: float) -> bool:
        if self._takes_turns and not self._pipe_lock.acquire(fd, patience_s):
            if lines:
                self._waiting.appendleft(lines)
            return False
        if not self._cut and not self._in_text and patience_s >= _STUCK_S:
            with contextlib.suppress(OSError):  # the other stream is closed: there is nothing to wait for
                self._await_other(fd)
        self._cut = _write_all(fd, self._cut or self._next_for_pipe(fd, lines), patience_s)
        return not self._cut

    def _await_other(self, fd: int) -> None:
        """Wait until what is in the other pipe was read; its reader is not waited for again before it has gone on."""
        other = _pipe_of(getattr(sys, self._other, None))
        unread = 0 if other is None else unread_bytes(other)
        if other is None or unread >= self._left_unread or os.path.sameopenfile(other, fd):
            return
        if self._name == "stderr":
            self._other_lock.acquire(other, _OTHER_PATIENCE_S)
            unread = unread_bytes(other)
        self._left_unread = (await_reader(other, _OTHER_PATIENCE_S) if unread else 0) or sys.maxsize

    def _next_for_pipe(self, fd: int, lines: bytes) -> bytes:
        """Return all but the last of the lines, which is put back.

        A single line is returned when others wait behind it, or else when the reader is ready for it.
        """
        last_line = lines.rfind(b"\n", 0, -1) + 1
        self._in_text = last_line > 0
        if last_line:
            self._waiting.appendleft(lines[last_line:])
            return lines[:last_line]
        if not self._waiting:
            await_reader(fd)
        return lines

    def _say_lost(self, error: Exception) -> None:
        if not self._said_lost:
            self._said_lost = True
            text = f"[torchrun] {self._name} can't be written to ({error}): what the workers write there is lost\n"
            write_text(self._other, text, 0.0)


_outputs = {name: _Output(name) for name in ("stdout", "stderr")}


def _begin_anew() -> None:
    """Empty the queues in a forked child: else both would write them. Its locks may be held by threads it lacks."""
    _outputs.update({name: _Output(name) for name in _outputs})


os.register_at_fork(after_in_child=_begin_anew)
for _name in _outputs:
    atexit.register(lambda name: _outputs[name].finish(), _name)


def _descriptor(target: TextIO) -> int | None:
    # A stream that somebody else has put there, as a notebook or a tee, may have one as well, but wants the text.
    with contextlib.suppress(OSError, ValueError):
        return target.fileno() if isinstance(target, io.TextIOWrapper) else None
    return None


def _pipe_of(target: TextIO | None) -> int | None:
    """Return the descriptor of a stream if it is a pipe."""
    with contextlib.suppress(OSError):
        fd = None if target is None else _descriptor(target)
        return fd if fd is not None and stat.S_ISFIFO(os.fstat(fd).st_mode) else None
    return None


def _flush(target: TextIO, fd: int, is_pipe: bool) -> None:
    """Write what other code has printed first, if there is room: this must not block."""
    if await_room(fd, 0.0) and not (is_pipe and unread_bytes(fd)):
        with contextlib.suppress(BlockingIOError):  # Python keeps what it could not write, for the next flush
            target.flush()


def _write_all(fd: int, data: bytes, patience_s: float) -> bytes:
    """Write in pieces as long as there is room, or comes in time; return the rest.

    Where there is room for anything, there is for ``PIPE_BUF`` bytes. A piece is of whole lines, where more follows.

    This goes past Python's own layers: unbuffered, they drop the rest of a write that a signal cuts short.
    """
    at = 0
    while at < len(data) and await_room(fd, patience_s):
        end = at + select.PIPE_BUF
        if end < len(data):
            end = data.rfind(b"\n", at, end) + 1 or end
        with contextlib.suppress(BlockingIOError):  # another process has filled the pipe first
            at += os.write(fd, memoryview(data)[at:end])
    return data[at:]
