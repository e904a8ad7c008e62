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
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress

from ..machine.streams import unread_bytes
from .ends import until_look
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
_HELD_UP_S = 0.05  # between two looks at a writer that is behind
_END_BYTES = 8 * 1024 * 1024  # of each pipe, read from a generation that stops although the writer is behind
_TAIL_BYTES = 64 * 1024
_LAST_LINES = 100  # of each stream of a hidden rank, shown if it fails
# How torchrun begins to report its own failure or a worker's (torch 2.13). The last is of a node that waits in the exit
# barrier while the store's host, which has passed it, ends: 22 lines of C++ frames, then "Error waiting on exit barrier".
_AGENT_REPORT = re.compile(
    rb"E\d{4} |Traceback \(most recent call last\):|\[W\d{4} .*TCPStore\.cpp:\d+\] \[c10d\] recvValue"
)

Write = Callable[[str, bytes], bool]
"""Takes a stream's name (``"stdout"`` or ``"stderr"``) and whole lines of UTF-8, or nothing; returns at once.

False: so much waits to be written that the source of the lines should wait, too.
"""
Show = Callable[[str, bytes], object]


def pipe_path(folder: str, process: int | str, stream: str) -> str:
    """Return the path of a stream's pipe; `process` is a local rank or `AGENT`."""
    return os.path.join(folder, f"{process}.{stream}")


class Pipe:
    """One stream of one process, until `files` are closed. `show` gets its lines, unless it is hidden."""

    def __init__(self, files: ExitStack, path: str, stream: str, label: str, show: Show, is_hidden: bool) -> None:
        os.mkfifo(path, 0o600)
        # Also for writing: so it has no end of file when a writer ends and another one comes.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        files.callback(os.close, self.fd)
        with suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.read_bytes = 0
        self.read_at = float("-inf")  # when something was last found in it
        self.ends_at = 0  # up to which byte it is read although the writer is behind
        self._stream, self._show, self._is_hidden = stream, show, is_hidden
        self._label = label.encode()  # before every line
        # What torch itself puts before a rank's lines on stderr (`_distributed_excepthook` and logging, 2.13): "[rank3]:".
        self._torchs_label = label.strip().replace(" ", "").encode() + b":" if stream == "stderr" else None
        self._splitter = LineSplitter()
        self._tail = bytearray()

    @property
    def tail(self) -> bytes:
        """The last 64 KiB that were read."""
        return bytes(self._tail[-_TAIL_BYTES:])

    def pump(self) -> int:
        """Show what is there, at most a chunk; return how many bytes that is."""
        try:
            data = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            data = b""
        if data:
            self.read_bytes += len(data)
            self.read_at = time.monotonic()
            self._tail += data
            if len(self._tail) > 2 * _TAIL_BYTES:
                del self._tail[:-_TAIL_BYTES]
        self._show_lines(self._splitter.feed(data))
        return len(data)

    def drain(self) -> None:
        """Show what is there by now; what is written meanwhile may wait."""
        left = unread_bytes(self.fd)
        while left > 0 and (found := self.pump()):
            left -= found

    def finish(self) -> None:
        """Show all that is there, an unfinished line too."""
        self.drain()
        self._show_lines(self._splitter.feed(b"", final=True))

    def reveal(self) -> None:
        """Show the last lines of one that was hidden; later ones are shown as they come."""
        if self._is_hidden:
            self._is_hidden = False
            lines = LineSplitter().feed(self.tail, final=True)
            self._show_lines(b"".join(lines.splitlines(keepends=True)[-_LAST_LINES:]))

    def _show_lines(self, lines: bytes) -> None:
        if lines and not self._is_hidden:
            if self._torchs_label and self._torchs_label in lines:
                lines = re.sub(rb"(?m)^%s ?" % re.escape(self._torchs_label), b"", lines)
            self._show(self._stream, self._label + lines[:-1].replace(b"\n", b"\n" + self._label) + b"\n")


class LogReader:
    """Reads all pipes of one generation of workers; it belongs to the loop of this process.

    `workers`: local rank -> the label of its lines, and whether they are hidden. With `holds_report` the agent's own
    report of a failure is held back until `finish`.
    """

    def __init__(
        self,
        folder: str,
        workers: Mapping[int, tuple[str, bool]],
        agent_label: str,
        write: Write,
        holds_report: bool = False,
    ) -> None:
        self._write = write
        self._holds_report = holds_report
        self._held: deque[bytes] = deque(maxlen=1000)  # lines of the agent's report of a failure
        self._timers: dict[str, asyncio.TimerHandle] = {}  # from `start` on
        self._is_closed = False
        self._pipes: dict[int | str, dict[str, Pipe]] = {}  # by process and stream
        self._by_fd: dict[int, Pipe] = {}
        with ExitStack() as files:  # closed here if one of them can't be opened
            # One file that is ready when any pipe is: a node may have hundreds.
            self._any = files.enter_context(select.epoll())
            os.mkfifo(pipe_path(folder, AGENT, "workers"), 0o600)  # for `supervisor.agent`
            shown: list[tuple[int | str, tuple[str, bool]]] = [(AGENT, (agent_label, False)), *workers.items()]
            for process, (label, is_hidden) in shown:
                show = self._show_agent if process == AGENT else write
                for stream in ("stdout", "stderr"):
                    pipe = Pipe(files, pipe_path(folder, process, stream), stream, label, show, is_hidden)
                    self._pipes.setdefault(process, {})[stream] = self._by_fd[pipe.fd] = pipe
                    self._any.register(pipe.fd, select.EPOLLIN)
            self._files = files.pop_all()
        self._of_workers = [pipe for rank in workers for pipe in self._pipes[rank].values()]

    def start(self) -> None:
        """Begin to read; call it in the loop."""
        self._loop = asyncio.get_running_loop()
        self._listen()
        self._look_at_all()

    # --- what it knows

    @property
    def last_output_at(self) -> float | None:
        """When workers were last found to have written, in monotonic seconds; now while they wait for the reader."""
        if not self._is_closed and self._is_behind() and any(unread_bytes(pipe.fd) for pipe in self._of_workers):
            return time.monotonic()
        return max((pipe.read_at for pipe in self._of_workers if pipe.read_bytes), default=None)

    def tail(self, process: int | str, stream: str) -> str:
        """Return the end of what a process has written by now; `process` is a local rank or `AGENT`."""
        pipe = self._pipes[process][stream]
        if not self._is_closed:
            pipe.drain()
        return pipe.tail.decode("utf-8", errors="replace")

    # --- what it is told

    def read_now(self, local_rank: int, failed: bool = False) -> None:
        """Show what a worker that has ended had written; one that has `failed` by itself is not hidden any more."""
        for pipe in () if self._is_closed else self._pipes.get(local_rank, {}).values():
            pipe.finish()
            if failed:
                pipe.reveal()

    def let_end(self) -> None:
        """Read on although the writer is behind, since the workers are stopped: one that saves may print before."""
        for pipe in self._of_workers:
            pipe.ends_at = pipe.ends_at or pipe.read_bytes + _END_BYTES

    def finish(self, explained: bool = False) -> None:
        """Show all that is left and end; safe to call more than once. Call it when no process writes any more.

        `explained`: the cause is known, and the agent's own report of the failure says less.
        """
        if self._is_closed:  # the numbers may be those of other files by now
            return
        self._is_closed = True
        if self._timers:
            self._loop.remove_reader(self._any.fileno())
        for timer in self._timers.values():
            timer.cancel()
        for pipe in (*self._of_workers, *self._pipes[AGENT].values()):
            pipe.finish()
        if self._held and not explained:
            self._write("stderr", b"".join(self._held))
        self._files.close()

    # --- reading ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._loop.add_reader(self._any.fileno(), self._read)

    def _read(self) -> None:
        """Read a chunk of each pipe that has something; after little, look again after a while."""
        if self._is_behind():
            ending = (pipe for pipe in self._of_workers if pipe.read_bytes < pipe.ends_at)
            for pipe in (*self._pipes[AGENT].values(), *ending):
                pipe.pump()
            most, pause_s = 0, _HELD_UP_S
        else:
            most, pause_s = max((self._by_fd[fd].pump() for fd, _ in self._any.poll(0)), default=0), _GATHER_S
        if most < _CHUNK_BYTES:
            self._loop.remove_reader(self._any.fileno())
            self._timers["listen"] = self._loop.call_later(pause_s, self._listen)

    def _look_at_all(self) -> None:
        """Look at those too who are quiet, since an unfinished line is shown after a while; it repeats itself."""
        if not self._is_behind():
            for pipe in self._by_fd.values():
                pipe.pump()
        self._timers["quiet"] = self._loop.call_later(until_look(), self._look_at_all)

    def _is_behind(self) -> bool:
        """Return whether the writer is too far behind to read the workers' output."""
        return not self._write("stdout", b"")

    def _show_agent(self, stream: str, lines: bytes) -> None:
        """Show what the agent writes, but hold back its report of a failure."""
        if self._holds_report and stream == "stderr":
            lines = b"".join(line for line in lines.splitlines(keepends=True) if not self._hold(line))
        if lines:
            self._write(stream, lines)

    def _hold(self, line: bytes) -> bool:
        if is_held := bool(self._held or _AGENT_REPORT.match(line.partition(b"] ")[2])):
            self._held.append(line)
        return is_held
