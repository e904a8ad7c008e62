"""Follows the log files of workers and agent, and writes their lines with labels to the task's log.

torchrun redirects every worker's stdout and stderr to files, and a thread of ours reads them. So a worker never
waits for us. What it wrote before it died is in the file, and is read up to the last byte.

The thread polls. With inotify the kernel could wake it, but then each write of a worker would cost more, and a
machine has few inotify instances (128 by default, for all containers of a user).
"""

from __future__ import annotations

import atexit
import glob
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import BinaryIO

from .lines import LineSplitter

# Between polls: under the half second in which a line must appear. Most of a poll's cost, some 0.3 ms, is waking up, so
# after a whole chunk the next poll follows soon. The end waits for no poll.
_LOOK_S, _FLOOD_LOOK_S = 0.4, 0.05
# Read at once. The C library maps memory for anything above 128 KiB, and the kernel clears it: that would take longer
# than all that is done with the bytes. With 96 KiB, that is so for lines that are no UTF-8.
_CHUNK_BYTES = 80 * 1024
# How torchrun begins to report its own failure or a worker's (torch 2.13), and how much of it is held back. The last is
# of a node that waits in the exit barrier while the store's host, which has passed it, ends: 22 lines of C++ frames,
# then "Error waiting on exit barrier".
_AGENT_REPORT = re.compile(
    rb"E\d{4} |Traceback \(most recent call last\):|\[W\d{4} .*TCPStore\.cpp:\d+\] \[c10d\] recvValue"
)
_HELD_LINES = 1000

Write = Callable[[str, bytes], bool]
"""Takes a stream's name (``"stdout"`` or ``"stderr"``) and whole lines of UTF-8, or nothing when no more comes for now.

Until then it may keep the last line.
Returns False after a while with a reader that takes nothing; what it has taken over by then is written later.
"""
Show = Callable[[str, bytes], None]


class FollowedFile:
    """One growing log file; it must exist."""

    def __init__(self, path: str, label: str, stream: str, hold_from: re.Pattern[bytes] | None = None) -> None:
        self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self._label = label.encode()  # put before every line
        self._stream = stream  # "stdout" or "stderr"
        self._hold_from = hold_from  # the first line that begins so is held back until the end, with all after it
        self._held: list[bytes] = []
        self._splitter = LineSplitter()
        # What torch itself puts before a rank's lines on stderr (`_distributed_excepthook` and logging, 2.13): "[rank3]:".
        self._torchs_label = self._label.strip().replace(b" ", b"") + b":" if stream == "stderr" else None
        self._ahead = b""  # what was read, and waits for the other stream
        self._read_bytes = 0
        self.close = self._file.close

    def pump(self, show: Show) -> int:
        """Show what was added, at most one chunk; return how many bytes that was."""
        self.read_ahead()
        return self.show_ahead(show)

    def show_ahead(self, show: Show) -> int:
        """Show what was read ahead; return how many bytes that was."""
        data, self._ahead = self._ahead, b""
        self._show(self._splitter.feed(data), show)
        return len(data)

    def read_ahead(self) -> bool:
        """Read what is to be shown next, at most one chunk; return whether that is something new."""
        if self._ahead:
            return False
        with suppress(OSError):  # a fault of the disk; the other files can still be read
            self._ahead = self._file.read(_CHUNK_BYTES)
        self._read_bytes += len(self._ahead)
        return bool(self._ahead)

    def size(self) -> int:
        """Return how many bytes the file has."""
        return os.fstat(self._file.fileno()).st_size

    def is_shown_to(self, size: int) -> bool:
        """Return whether so much of the file was shown, or all that it has by now."""
        return self._read_bytes >= size or self._read_bytes >= self.size()

    def finish(self, show: Show, show_held: bool) -> None:
        """Show everything up to the end, an unfinished last line too."""
        while self.pump(show):
            pass
        self._show(self._splitter.feed(b"", final=True), show)
        if show_held:
            self._hold_from = None
            self._show(b"".join(self._held), show)

    def _show(self, lines: bytes, show: Show) -> None:
        """Show whole lines with their label, except for those that are held back."""
        if self._torchs_label is not None:
            lines = _without(self._torchs_label, lines)
        if self._hold_from is not None:
            pattern = self._hold_from
            lines = b"".join(line for line in lines.splitlines(keepends=True) if not self._hold(line, pattern))
        if lines:
            show(self._stream, self._label + lines[:-1].replace(b"\n", b"\n" + self._label) + b"\n")

    def _hold(self, line: bytes, hold_from: re.Pattern[bytes]) -> bool:
        if len(self._held) >= _HELD_LINES:
            return False
        is_held = bool(self._held or hold_from.match(line))
        if is_held:
            self._held.append(line)
        return is_held


def _without(label: bytes, lines: bytes) -> bytes:
    """Return the lines without this label at their begins."""
    return re.sub(rb"(?m)^%s ?" % re.escape(label), b"", lines) if label in lines else lines


class _Process:
    """The two files of one process; stdout that was written before stderr is shown before it."""

    def __init__(self, **files: FollowedFile) -> None:
        self.files = files  # by stream
        self._stdout_first = 0  # so many bytes of stdout go before what is read ahead of stderr

    def pump_stdout(self, show: Show) -> int:
        """Show a chunk; before that, note which stderr there is: all that is written later can wait."""
        stdout, stderr = self.files.get("stdout"), self.files.get("stderr")
        if stderr is not None and stderr.read_ahead():
            self._stdout_first = 0 if stdout is None else stdout.size()
        return 0 if stdout is None else stdout.pump(show)

    def pump_stderr(self, show: Show) -> int:
        """Show a chunk if its turn has come."""
        stdout, stderr = self.files.get("stdout"), self.files.get("stderr")
        if stderr is None or not (stdout is None or stdout.is_shown_to(self._stdout_first)):
            return 0
        return stderr.show_ahead(show)


class LogFollower:
    """Follows all logs of one generation of workers in a thread of its own.

    If the reader of our output pauses, only this thread stops: unread output is safe in the files. If the reader still
    pauses at the end, the thread continues alone, with files that are open and perhaps removed.
    """

    def __init__(
        self,
        log_dir: str,
        agent_logs: dict[str, str],
        label: Callable[[int], str | None],
        agent_label: str,
        write: Write,
        hold_report: bool = False,
    ) -> None:
        self._log_dir = log_dir  # torchrun's --log-dir
        self._label = label  # local rank -> label; None for a rank that is not shown
        self._write = write
        hold = _AGENT_REPORT if hold_report else None  # until `finish`
        # What is followed belongs to this object's thread; others may read how many lines were shown.
        # `agent_logs`: stream -> file of the agent's own output.
        agent = {stream: FollowedFile(path, agent_label, stream, hold) for stream, path in agent_logs.items()}
        self._files = list(agent.values())
        self._processes = {"": _Process(**agent)}  # by folder
        self._known: set[str] = set()  # written by this object's thread, read by others, too
        # The stream that must still learn that no more lines follow for now; only this object's thread touches it.
        self._unended: str | None = None
        self._stop = threading.Event()
        self._released = threading.Event()  # set by this object's thread for those that wait for it
        self._explained = False  # set before `_stop`, read after
        self._thread = threading.Thread(target=self._follow, name="torchrun-logs", daemon=True)
        self._seen_bytes = 0
        self._grew_at: float | None = None

    def written_bytes(self) -> int:
        """Return how much the workers have written; hidden ranks count.

        It is the files that tell: the thread that reads them may be waiting for the reader of our output.
        """
        return sum(map(_size, list(self._known)))

    @property
    def last_output_at(self) -> float | None:
        """When workers were last found to have written, in monotonic seconds."""
        written = self.written_bytes()
        if written > self._seen_bytes:
            self._seen_bytes, self._grew_at = written, time.monotonic()
        return self._grew_at

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def finish(self, explained: bool = False) -> None:
        """Show all that is left and end. Call it when no process writes any more.

        A reader that takes nothing is not waited for; until the process's end it can still have all.
        """
        self._explained = explained  # the cause is known, and the agent's own report of the failure says less
        self._stop.set()
        self._await_thread()
        if self._thread.is_alive():
            self._released.clear()
            atexit.register(self._await_thread)

    def _await_thread(self) -> None:
        """Wait until this object's thread ends, or until the reader of our output has taken nothing for too long."""
        while self._thread.is_alive() and not self._released.is_set():
            self._thread.join(_LOOK_S)

    def _follow(self) -> None:
        try:
            pause_s = _LOOK_S
            while not self._stop.wait(pause_s):
                pause_s = _FLOOD_LOOK_S if self._look() else _LOOK_S
            self._find_files()
            for stream in ("stdout", "stderr"):
                for process in list(self._processes.values()):
                    if stream in process.files:
                        process.files[stream].finish(self._show, show_held=not self._explained)
            self._end_of_look()
        finally:
            for file in self._files:
                file.close()

    def _look(self) -> bool:
        """Show new output; return whether it was much."""
        self._find_files()
        turns, most = 0, _CHUNK_BYTES
        while most == _CHUNK_BYTES:  # in turns, so that one rank with much output does not hide the others
            processes = list(self._processes.values())  # more can be found meanwhile
            loudest = max(process.pump_stdout(self._show) for process in processes)
            turns, most = turns + 1, max(loudest, *(process.pump_stderr(self._show) for process in processes))
        self._end_of_look()
        return turns > 1

    def _end_of_look(self) -> None:
        if self._unended is not None:
            stream, self._unended = self._unended, None
            self._hand_over(stream, b"")

    def _show(self, stream: str, lines: bytes) -> None:
        if stream != self._unended:
            self._end_of_look()
        self._unended = stream
        self._hand_over(stream, lines)

    def _hand_over(self, stream: str, lines: bytes) -> None:
        """Write, and wait for the reader as long as it takes."""
        while not self._write(stream, lines):
            lines = b""
            if self._stop.is_set():
                self._find_files()  # the folder may be removed as soon as no thread waits
                self._released.set()

    def _find_files(self) -> None:
        for path, local_rank, stream in new_logs(self._log_dir, self._known):
            label = self._label(local_rank)
            try:
                if label is not None:
                    file = FollowedFile(path, label, stream)
                    self._files.append(file)
                    self._processes.setdefault(os.path.dirname(path), _Process()).files[stream] = file
            except OSError as error:  # too many open files, perhaps not for long
                if not self._stop.is_set():
                    continue
                self._write("stderr", f"[torchrun] {path} can't be read: {error}\n".encode(errors="replace"))
            self._known.add(path)


def _size(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_size
    return 0


def new_logs(log_dir: str, known: Collection[str]) -> Iterator[tuple[str, int, str]]:
    """Yield path, local rank and stream of the log files under torchrun's ``--log-dir`` that are not `known`.

    Their layout is ``<run id>_<random>/attempt_<n>/<local rank>/stdout.log`` (``DefaultLogsSpecs`` in
    ``torch/distributed/elastic/multiprocessing/api.py``, torch 2.13).
    """
    for folder in sorted(glob.glob(f"{glob.escape(log_dir)}/*/attempt_*/*")):
        rank = os.path.basename(folder)
        for stream in ("stderr", "stdout") if rank.isdigit() else ():
            path = f"{folder}/{stream}.log"
            if path not in known and os.path.exists(path):
                yield path, int(rank), stream


def worker_folder(log_dir: str, local_rank: int) -> str:
    """Return the folder with a worker's logs and error file; it may not exist."""
    found = glob.glob(f"{glob.escape(log_dir)}/*/attempt_*/{local_rank}")
    return max(found, key=os.path.getmtime, default=f"{log_dir}/none")
