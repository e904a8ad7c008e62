"""Writes whole lines to the task's own stdout and stderr, from one thread for both.

All text waits in one queue, in the order in which it came. The thread writes it, and waits for the reader as long as it
takes: a reader may pause for hours, as a stopped terminal does. Nobody else waits for it, but for who calls `settle`,
and the process's end. The thread ends when it has nothing to write, since a task's own code may fork. On a local run all
nodes write to the pipes of the control task, one text at a time: see `shared_pipe`.

Metaflow's local runtime (``Worker.read_logline`` in ``metaflow/runtime.py``, 2.19) reads two pipes, and takes a line of
each in turns: on a terminal, a line on stderr may stand a little before or behind what was printed before it. The
runtime takes as much out of a pipe at once as its buffer holds, but shows one line each time the pipe has something to
read. When the pipe is empty it stops, whatever it has not shown. So the last line waits until the others are taken, and
makes the runtime go on: it shows all. This wait ends when the reader takes nothing for a while.
"""

from __future__ import annotations

import _thread
import atexit
import fcntl
import io
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TextIO, TypeAlias

from ..events import Event, label
from ..machine.open_files import file_of
from .shared_pipe import SharedPipe, await_reader, await_room, is_pipe, unread_bytes

DEBUG = "METAFLOW_TORCHRUN_DEBUG"
"""Environment variable: ``1`` has the details written, too."""

BEHIND_BYTES = 8 * 1024 * 1024
"""With so much unwritten, workers are kept waiting."""
_TURN_BYTES = 64 * 1024  # written in one turn; a longer line is written whole
_READER_PATIENCE_S = 0.05  # for a reader that takes nothing, before the last line of a text
_STUCK_S = 3.0  # for a reader that takes nothing, when this process was told to end
_LOOK_S = 0.5
_LINGER_S = 0.1  # how long the thread waits for more

STREAMS = ("stdout", "stderr")

_Item: TypeAlias = "tuple[str, bytes] | Callable[[], object]"  # whole lines of a stream, or what is done in its turn


def write_output(stream: str, lines: bytes) -> bool:
    """Have whole lines of UTF-8 written to stdout or stderr; return False if so much waits that its source should, too.

    Any thread may call it, and it returns at once. Without lines it only answers. Nothing is lost while the stream can
    be read. If the stream has no reader any more, text is dropped, and one line says so.
    """
    return _writer.put(stream, lines)


def write_text(stream: str, text: str, patience_s: float = _STUCK_S) -> bool:
    """Write whole lines; return whether they and all text before them are written within `patience_s`, later ones later."""
    if text:
        _writer.put(stream, text.encode(errors="backslashreplace"))
    return settle(patience_s)


def when_written(call: Callable[[], object]) -> None:
    """Have a function called in the thread that writes, when all before is written."""
    _writer.put_call(call)


def to_log(event: Event, num_nodes: int) -> None:
    """Write an event to the node's log, on stderr like Metaflow's own lines, unless the supervisor has."""
    if not event.is_written:
        _writer.put("stderr", event_text(event, num_nodes))


def event_text(event: Event, num_nodes: int) -> bytes:
    """Return an event's lines in the log; of details none without `DEBUG`."""
    if event.is_detail and os.environ.get(DEBUG, "") in ("", "0"):
        return b""
    text = "".join(f"{label(event.node, num_nodes)}{line}\n" for line in event.text.splitlines())
    return text.encode(errors="backslashreplace")


def is_elsewhere(stream: str, own: tuple[int, int] | None) -> bool:
    """Return whether `sys.stdout` or `sys.stderr` does not write to the file `own`; see `file_of`."""
    target = getattr(sys, stream)
    fd = None if target is None else _descriptor(target)
    return fd is None or own is None or file_of(fd) != own


def settle(patience_s: float | None = None) -> bool:
    """Wait until all text so far is written, or for so long; return whether it is. A signal handler may raise out of it."""
    return _writer.settle(patience_s)


def has_unread() -> bool:
    """Return whether the reader of this process's pipes has not taken all that it and others have written."""
    found = (_descriptor(each) for name in STREAMS if (each := getattr(sys, name)) is not None)
    return any(unread_bytes(fd) for fd in found if fd is not None and is_pipe(fd))


def has_given_up() -> bool:
    """Return whether this process was told to hurry, and the reader takes nothing."""
    return _writer.has_given_up


def hurry() -> None:
    """Keep the process's end from waiting for a reader that takes nothing: it was told to end."""
    _writer.is_hurried = True


class _Writer:
    """The queue and the thread.

    Any thread may put, also from within a signal handler: `SimpleQueue.put` is reentrant. Two threads that put at the same
    time may lose one addition to `_put_bytes`; then a little more than the limit waits. Only who holds `_writing`
    removes, and it alone touches the fields below that lock.
    """

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._put_bytes = self._written_bytes = 0
        self.is_hurried = False
        self._busy_since: float | None = None  # when the thread began to wait for the reader of the current text
        self._is_over = False  # whether the interpreter ends; who puts then waits
        self._has_thread = False
        self._writing = _thread.allocate_lock()  # held by the thread
        self._ahead: _Item | None = None  # taken from the queue too early
        self._pipe = SharedPipe()
        self._own_fd: int | None = None  # a copy of the descriptor that is written to
        self._lost: set[str] = set()  # streams of which was said that they can't be written to

    def put(self, stream: str, lines: bytes) -> bool:
        """Add a text; return whether there is room for more."""
        if lines:
            self._put_bytes += len(lines)
            self._texts.put((stream, lines))
            self._have_written()
            if self._is_over:
                self.settle(_STUCK_S)
        return self._put_bytes - self._written_bytes < BEHIND_BYTES

    def put_call(self, call: Callable[[], object]) -> None:
        """Have a function called in its turn."""
        self._texts.put(call)
        self._have_written()

    def settle(self, patience_s: float | None) -> bool:
        """Wait until all that was put before is written."""
        if self._texts.empty() and not self._writing.locked():  # in this order: a text is taken by who has the lock
            return True
        written = threading.Event()
        self.put_call(written.set)
        return written.wait(patience_s)

    @property
    def has_given_up(self) -> bool:
        """Whether nobody waits for the reader any more, since it has kept the thread waiting for long."""
        since = self._busy_since
        return self.is_hurried and since is not None and time.monotonic() - since > _STUCK_S

    def end(self) -> None:
        """Wait until all is written, or, in a hurry, until its reader takes nothing; it is the process's end."""
        written = threading.Event()
        self.put_call(written.set)
        while not written.wait(_LOOK_S) and not self.has_given_up:
            pass
        self._is_over = True

    def close(self) -> None:
        """Let go of the pipe and its lock, in a fork of the process."""
        self._pipe.forget()
        if self._own_fd is not None:
            os.close(self._own_fd)

    def _have_written(self) -> None:
        """Start the thread; where no thread can start any more, write here."""
        if self._has_thread:
            return
        try:
            # In one call: a signal handler that raises within `Thread.start` would leave half a thread, or a lock that is
            # held. Who puts before the thread has said that it is there starts another, which waits for this one's end.
            _thread.start_new_thread(self._run, ())
        except RuntimeError:
            while not self._texts.empty() and self._writing.acquire(blocking=False):
                try:
                    while self._write_next():
                        pass
                finally:
                    self._writing.release()

    # --- while `_writing` is held

    def _run(self) -> None:
        self._has_thread = True
        with self._writing:
            # First it says that it is gone, and then looks once more: whoever puts later starts another.
            while self._has_thread or not self._texts.empty():
                try:
                    self._has_thread = self._write_next(_LINGER_S)
                except BaseException as error:  # no memory; without this thread the process would never end
                    text = f"[torchrun] some lines could not be written ({type(error).__name__})\n"
                    self._write("stderr", text.encode())

    def _write_next(self, wait_s: float = 0.0) -> bool:
        """Write the next text, with those behind it for the same stream; return False if there is none."""
        found = self._next(wait_s)
        if found is None:
            return False
        if not isinstance(found, tuple):
            found()
            return True
        self._busy_since = time.monotonic()
        stream, parts, size = found[0], [found[1]], len(found[1])
        while isinstance(more := self._next(), tuple) and more[0] == stream and size < _TURN_BYTES:
            parts.append(more[1])
            size += len(more[1])
        self._ahead = more
        try:
            pieces = list(_pieces(b"".join(parts)))
            for number, piece in enumerate(pieces, 1):
                self._write(stream, piece, number < len(pieces) or (isinstance(more, tuple) and more[0] == stream))
        finally:
            self._written_bytes += size
            self._busy_since = None
        return True

    def _next(self, wait_s: float = 0.0) -> _Item | None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return ahead
        with suppress(queue.Empty):
            return self._texts.get(wait_s > 0, wait_s)
        return None

    def _write(self, stream: str, lines: bytes, more_follows: bool = False) -> None:
        """Write whole lines in one turn; `more_follows` on the same stream."""
        try:
            target: TextIO | None = getattr(sys, stream)
            if target is None:  # closed before Python began
                raise OSError(f"there is no {stream}")
            fd = _descriptor(target)
            if fd is None:
                text, encoding = lines.decode(errors="replace"), getattr(target, "encoding", None) or "utf-8"
                target.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
                target.flush()
                return
            # A copy, since the step's code may close its file while we wait, and open another one with that number.
            self._own_fd = own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
            with self._pipe.turn(own):
                _flush(target)
                self._write_to(own, lines, more_follows)
        except BaseException as error:  # a stream that the step's code has put there can raise anything
            self._say_lost(stream, error)
        finally:
            if self._own_fd is not None:
                os.close(self._own_fd)
                self._own_fd = None

    def _write_to(self, fd: int, lines: bytes, more_follows: bool) -> None:
        last = lines.rfind(b"\n", 0, -1) + 1
        if is_pipe(fd) and not more_follows:
            self._write_all(fd, lines[:last])
            await_reader(fd, _READER_PATIENCE_S)
            lines = lines[last:]
        self._write_all(fd, lines)

    def _write_all(self, fd: int, data: bytes) -> None:
        """Write in pieces that the kernel does not mix with what others write, if no line is longer than that.

        This goes past Python's own layers: unbuffered, they drop the rest of a write that a signal cuts short.
        """
        at = 0
        while at < len(data):
            end = at + select.PIPE_BUF
            if end < len(data):
                end = data.rfind(b"\n", at, end) + 1 or end
            try:
                at += os.write(fd, memoryview(data)[at:end])
                self._busy_since = time.monotonic()  # the reader goes on
            except BlockingIOError:  # some program has made it non-blocking, for all that share it
                await_room(fd)

    def _say_lost(self, stream: str, error: BaseException) -> None:
        if stream not in self._lost:
            self._lost.add(stream)
            other = "stderr" if stream == "stdout" else "stdout"
            why = type(error).__name__
            with suppress(BaseException):  # its own text may raise, too
                why = str(error) or why
            text = f"[torchrun] {stream} can't be written to ({why}): what the workers write there is lost\n"
            if other not in self._lost:
                self._write(other, text.encode(errors="backslashreplace"))


_writer = _Writer()


def _begin_anew() -> None:
    """Empty the queue in a forked child: else both would write it, and the child would hold the parent's locks."""
    global _writer
    _writer.close()
    _writer = _Writer()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _writer.end())


def _pieces(lines: bytes) -> Iterator[bytes]:
    """Cut between lines: a piece has `_TURN_BYTES` at most, or one longer line."""
    begin = 0
    while len(lines) - begin > _TURN_BYTES:
        end = lines.rfind(b"\n", begin, begin + _TURN_BYTES) + 1 or lines.find(b"\n", begin + _TURN_BYTES) + 1
        yield lines[begin : end or len(lines)]
        begin = end or len(lines)
    if begin < len(lines):
        yield lines[begin:]


def _descriptor(target: TextIO) -> int | None:
    # A stream that somebody else has put there, as a notebook, a tee or a compressed file, may have one as well, but
    # wants the text.
    with suppress(OSError, ValueError):
        if isinstance(target, io.TextIOWrapper):
            buffer = target.buffer
            return target.fileno() if isinstance(getattr(buffer, "raw", buffer), io.FileIO) else None
    return None


def _flush(target: TextIO) -> None:
    """Write what other code has printed first."""
    with suppress(BlockingIOError):  # Python keeps what it could not write, for the next flush
        target.flush()
