"""Reads what the workers and the agent of one generation write, labels whole lines, and has them written.

Each stream of each process is a named pipe (FIFO), which exists before the process starts. It is read as it is written.
When the writer of the task's own output is too far behind, reading stops and the workers wait, as in any shell pipe.
The agent's own streams are always read: they hardly write, and what they say tells how workers ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from ..machine.looks import until_look
from ..machine.streams import unread_bytes
from .lines import LineSplitter

AGENT = "agent"
"""The name of the agent among the processes; a worker's is its local rank."""
# Read at once. The C library maps memory for anything above 128 KiB, and the kernel clears it: that would take longer
# than all that is done with the bytes.
_CHUNK_BYTES = 64 * 1024
# What a pipe holds: a traceback in one piece, and what a loud rank writes between two looks. Without the right to so
# much (``/proc/sys/fs/pipe-user-pages-soft``) a pipe has 64 KiB or less; that costs speed alone.
_PIPE_BYTES = 256 * 1024
_GATHER_S = 0.02  # after a look that found little, so that many short lines cost one look
_BURST_S = 0.01  # of reading, before others have their turn
_HELD_UP_S = 0.05  # between two looks at a writer that is behind
_END_BYTES = 8 * 1024 * 1024  # of each worker, read from a generation that stops although the writer is behind
_PAUSED_S = 5.0  # with a writer that is behind all that time, the workers are said to wait
_TAIL_BYTES = 64 * 1024
_LAST_LINES = 100  # of a hidden rank, shown if it fails
# How torchrun begins to report its own failure or a worker's (torch 2.13), and how much of it is held back. The last is
# of a node that waits in the exit barrier while the store's host, which has passed it, ends: 22 lines of C++ frames,
# then "Error waiting on exit barrier".
_AGENT_REPORT = re.compile(
    rb"E\d{4} |Traceback \(most recent call last\):|\[W\d{4} .*TCPStore\.cpp:\d+\] \[c10d\] recvValue"
)
_HELD_LINES = 1000

Write = Callable[[str, bytes], bool]
"""Takes a stream's name (``"stdout"`` or ``"stderr"``) and whole lines of UTF-8, or nothing; returns at once.

False: so much waits to be written that the source of the lines should wait, too.
"""
Show = Callable[[str, bytes], None]
Tail = Callable[[int | str, str], str]
"""Returns the end of what a process, a local rank or `AGENT`, has written to a stream."""


def pipe_path(folder: str, process: int | str, stream: str) -> str:
    """Return the path of a stream's pipe; `process` is a local rank or `AGENT`."""
    return os.path.join(folder, f"{process}.{stream}")


class Pipe:
    """One stream of one process, until `files` are closed."""

    def __init__(self, files: ExitStack, folder: str, process: int | str, stream: str, label: str) -> None:
        self.stream = stream
        path = pipe_path(folder, process, stream)
        os.mkfifo(path, 0o600)
        # Also for writing: so it has no end of file when a writer ends and another one comes.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        files.callback(os.close, self.fd)
        with suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.read_bytes = 0
        self._label = label.encode()  # before every line
        # What torch itself puts before a rank's lines on stderr (`_distributed_excepthook` and logging, 2.13): "[rank3]:".
        is_torchs = stream == "stderr" and process != AGENT
        self._torchs_label = label.strip().replace(" ", "").encode() + b":" if is_torchs else None
        self._splitter = LineSplitter()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def read(self) -> bytes:
        """Return what is there, at most a chunk."""
        try:
            data = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        if data:
            self.read_bytes += len(data)
            self._remember(data)
        return data

    def _remember(self, data: bytes) -> None:
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def tail(self) -> str:
        """The last 64 KiB that were read."""
        return b"".join(self._tail)[-_TAIL_BYTES:].decode("utf-8", errors="replace")

    def lines(self, data: bytes, final: bool = False) -> bytes:
        """Return the whole lines, with their label, that are to be shown now."""
        lines = self._splitter.feed(data, final)
        if self._torchs_label is not None and self._torchs_label in lines:
            lines = re.sub(rb"(?m)^%s ?" % re.escape(self._torchs_label), b"", lines)
        if not lines:
            return b""
        return self._label + lines[:-1].replace(b"\n", b"\n" + self._label) + b"\n"

    @property
    def has_unread(self) -> bool:
        """Whether something waits in it."""
        return unread_bytes(self.fd) > 0


class _Process:
    """The two streams of one process."""

    def __init__(
        self, files: ExitStack, folder: str, name: int | str, label: str, is_hidden: bool = False, cuts: bool = False
    ) -> None:
        self.pipes = {stream: Pipe(files, folder, name, stream, label) for stream in ("stdout", "stderr")}
        self.fds = {pipe.fd for pipe in self.pipes.values()}
        self._cuts = cuts  # whether a line on stderr ends an unfinished one on stdout
        self._hidden: deque[tuple[str, bytes]] | None = deque() if is_hidden else None  # the last that was hidden
        self._hidden_bytes = 0

    @property
    def read_bytes(self) -> int:
        """How much of it was read."""
        return sum(pipe.read_bytes for pipe in self.pipes.values())

    def pump(self, show: Show) -> int:
        """Show what is there, at most a chunk of each stream; return how many bytes the larger one had."""
        stdout, stderr = self.pipes["stdout"], self.pipes["stderr"]
        printed, errors = stdout.read(), stderr.read()
        self._show("stdout", stdout.lines(printed), show)
        self._show("stdout", stdout.lines(b"", final=self._cuts and bool(errors)), show)
        self._show("stderr", stderr.lines(errors), show)
        return max(len(errors), len(printed))

    def finish(self, show: Show) -> bool:
        """Show all that is there, unfinished lines too; return whether there was anything."""
        found = self.drain(show)
        for stream, pipe in self.pipes.items():
            self._show(stream, pipe.lines(b"", final=True), show)
        return found

    def drain(self, show: Show) -> bool:
        """Show what is there by now, and return whether that is anything; what is written meanwhile may wait."""
        left = unread = sum(unread_bytes(pipe.fd) for pipe in self.pipes.values())
        while left > 0 and (found := self.pump(show)):
            left -= found
        return unread > 0

    def reveal(self, show: Show) -> None:
        """Show the last lines that were hidden; later ones are shown as they come."""
        hidden, self._hidden = self._hidden, None
        count, texts = 0, list[tuple[str, bytes]]()
        while hidden and count < _LAST_LINES:
            stream, lines = hidden.pop()
            parts = lines.splitlines(keepends=True)[-(_LAST_LINES - count) :]
            count += len(parts)
            texts.append((stream, b"".join(parts)))
        for stream, lines in reversed(texts):
            show(stream, lines)

    def _show(self, stream: str, lines: bytes, show: Show) -> None:
        if self._hidden is None:
            if lines:
                show(stream, lines)
        elif lines:
            self._hidden.append((stream, lines))
            self._hidden_bytes += len(lines)
            while len(self._hidden) > 1 and self._hidden_bytes > 2 * _TAIL_BYTES:
                self._hidden_bytes -= len(self._hidden.popleft()[1])


class LogReader:
    """Reads all pipes of one generation of workers; it belongs to the loop of this process."""

    def __init__(
        self,
        folder: str,
        workers: Mapping[int, tuple[str, bool]],
        agent_label: str,
        write: Write,
        holds_report: bool = False,
        cuts: bool = False,
    ) -> None:
        self._write = write
        self._holds_report = holds_report  # of the agent's own failure, until `finish`
        self._held: list[bytes] = []
        self._ends_at: dict[int, int] = {}  # local rank -> up to which byte it is read although the writer is behind
        self._loop: asyncio.AbstractEventLoop | None = None  # from `start` on
        self._timers: dict[str, asyncio.TimerHandle] = {}
        with ExitStack() as files:  # closed here if one of them can't be opened
            # One file that is ready when any pipe is: a node may have hundreds.
            self._any = files.enter_context(select.epoll())
            self._agent = _Process(files, folder, AGENT, agent_label)
            os.mkfifo(pipe_path(folder, AGENT, "workers"), 0o600)  # for `node.agent`
            # `workers`: local rank -> label, and whether it is hidden.
            self._workers = {rank: _Process(files, folder, rank, *shown, cuts) for rank, shown in workers.items()}
            self._files = files.pop_all()
        self._read_at: float | None = None
        self._held_up_since: float | None = None
        self._is_closed = False
        self._shown = [(self._agent, self._show_agent), *((each, self._show) for each in self._workers.values())]
        for process, _ in self._shown:
            for fd in process.fds:
                self._any.register(fd, select.EPOLLIN)

    def start(self) -> None:
        """Begin to read; call it in the loop."""
        self._loop = asyncio.get_running_loop()
        self._listen()
        self._timers["quiet"] = self._loop.call_later(until_look(), self._look_at_all)

    # --- what it knows

    def written_bytes(self) -> int:
        """Return how much of the workers was read; hidden ranks count."""
        return sum(worker.read_bytes for worker in self._workers.values())

    @property
    def last_output_at(self) -> float | None:
        """When workers were last found to have written, in monotonic seconds; now while they wait for the reader."""
        return self._read_at if self._waiting_s() is None else time.monotonic()

    @property
    def is_held_up(self) -> bool:
        """Whether the workers have to wait, since nobody reads what they have written."""
        waiting_s = self._waiting_s()
        return waiting_s is not None and waiting_s >= _PAUSED_S

    def _waiting_s(self) -> float | None:
        """Return for how long workers wait for the writer; None if it is not behind, or they have written nothing."""
        since, pipes = self._held_up_since, (pipe for each in self._workers.values() for pipe in each.pipes.values())
        if since is None or self._is_closed or not any(pipe.has_unread for pipe in pipes):
            return None
        return time.monotonic() - since

    def tail(self, process: int | str, stream: str) -> str:
        """Return the end of what a process has written by now; `process` is a local rank or `AGENT`."""
        found = self._agent if process == AGENT else self._workers.get(int(process))
        if found is None:
            return ""
        if not self._is_closed:
            is_read = found.drain(self._show_agent if found is self._agent else self._show)
            self._note_read(is_read and found is not self._agent)
        return found.pipes[stream].tail

    # --- what it is told

    def read_now(self, local_rank: int, failed: bool = False) -> None:
        """Show what a worker that has ended had written; one that has `failed` by itself is not hidden any more."""
        worker = self._workers.get(local_rank)
        if worker is not None and not self._is_closed:
            self._note_read(worker.drain(self._show))
            if failed:
                worker.reveal(self._show)

    def let_end(self) -> None:
        """Read on although the writer is behind, since the workers are stopped: one that saves may print before."""
        if not self._ends_at:
            self._ends_at = {rank: worker.read_bytes + _END_BYTES for rank, worker in self._workers.items()}

    def finish(self, explained: bool = False) -> None:
        """Show all that is left and end; safe to call more than once. Call it when no process writes any more.

        `explained`: the cause is known, and the agent's own report of the failure says less.
        """
        if self._is_closed:  # the numbers may be those of other files by now
            return
        self._is_closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._any.fileno())
        for timer in self._timers.values():
            timer.cancel()
        for worker in self._workers.values():
            self._note_read(worker.finish(self._show))
        self._agent.finish(self._show_agent)
        if self._held and not explained:
            self._write("stderr", b"".join(self._held))
        self._files.close()

    # --- reading ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._loop is not None
        self._loop.add_reader(self._any.fileno(), self._read)

    def _read(self) -> None:
        """Read a chunk of each pipe that has something, and look again after a while."""
        assert self._loop is not None
        self._loop.remove_reader(self._any.fileno())
        pause_s = _HELD_UP_S
        try:
            if self._is_held_up():
                self._agent.pump(self._show_agent)
                for rank, end in self._ends_at.items():
                    if self._workers[rank].read_bytes < end:
                        self._workers[rank].pump(self._show)
            else:
                pause_s = 0.0 if self._read_burst() else _GATHER_S
        finally:
            self._timers["listen"] = self._loop.call_later(pause_s, self._listen)

    def _read_burst(self) -> bool:
        """Read what is there, for a moment; return whether that is much, so that more comes at once."""
        until, read = time.monotonic() + _BURST_S, 0
        while True:
            fds = {fd for fd, _ in self._any.poll(0)}
            most = self._pump([each for each in self._shown if not fds.isdisjoint(each[0].fds)])
            read += most
            if most < _CHUNK_BYTES or time.monotonic() > until or self._is_held_up():
                return read >= _CHUNK_BYTES

    def _look_at_all(self) -> None:
        """Look at those too who are quiet, since an unfinished line is shown after a while."""
        assert self._loop is not None
        if not self._is_held_up():
            self._pump(self._shown)
        self._timers["quiet"] = self._loop.call_later(until_look(), self._look_at_all)

    def _pump(self, some: Sequence[tuple[_Process, Show]]) -> int:
        """Show a chunk of some processes; return how many bytes the loudest had."""
        found = [process.pump(show) for process, show in some]
        self._note_read(any(found[1:] if some and some[0][0] is self._agent else found))
        return max(found, default=0)

    def _is_held_up(self) -> bool:
        if self._write("stdout", b""):
            self._held_up_since = None
            return False
        self._held_up_since = self._held_up_since or time.monotonic()
        return True

    def _note_read(self, of_workers: bool) -> None:
        if of_workers:
            self._read_at = time.monotonic()

    def _show(self, stream: str, lines: bytes) -> None:
        self._write(stream, lines)

    def _show_agent(self, stream: str, lines: bytes) -> None:
        """Show the agent's lines, but hold back its report of a failure."""
        if self._holds_report and stream == "stderr":
            lines = b"".join(line for line in lines.splitlines(keepends=True) if not self._hold(line))
        if lines:
            self._write(stream, lines)

    def _hold(self, line: bytes) -> bool:
        if len(self._held) >= _HELD_LINES:
            return False
        is_held = bool(self._held or _AGENT_REPORT.match(line.partition(b"] ")[2]))
        if is_held:
            self._held.append(line)
        return is_held
