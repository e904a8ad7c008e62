"""What a rank wrote to stdout stands before what it wrote to stderr after that, and a block on stderr in one piece."""

import contextlib
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from limits import limit_s
from loops import InLoop, Loop
from metaflow.procpoll import make_poll
from metaflow.runtime import Worker

from metaflow_extensions.torchrun.plugins.torchrun.logs import console
from metaflow_extensions.torchrun.plugins.torchrun.logs.pipes import LogReader, pipe_path

STREAMS = ("stdout", "stderr")
PAIRS = 30  # a few lines and a traceback, in turns


class Terminal:
    """Metaflow's local runtime (2.19) at the other end of a task's two pipes: one line of each that has something."""

    def __init__(self):
        self.shown = []
        self._pipes = [os.pipe(), os.pipe()]
        self.streams = [os.fdopen(writing, "w", encoding="utf-8") for _, writing in self._pipes]
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        poll, ended = make_poll(), 0
        files = {reading: os.fdopen(reading, "rb", 8192) for reading, _ in self._pipes}
        worker = SimpleNamespace(
            _logs={fd: (file, None) for fd, file in files.items()},
            emit_log=lambda line, _: self.shown.append(line.decode().rstrip("\n")),
        )
        # stderr is asked first, as in `Worker.fds`
        for fd in reversed(files):
            poll.add(fd)
        while ended < 2:
            for event in poll.poll(1000):
                if event.can_read:
                    Worker.read_logline(worker, event.fd)
                elif event.is_terminated:
                    while Worker.read_logline(worker, event.fd):
                        pass
                    poll.remove(event.fd)
                    ended += 1
        for file in files.values():
            file.close()

    def lines(self):
        """Return all that was shown, once nobody writes any more."""
        for stream in self.streams:
            with contextlib.suppress(OSError):
                stream.close()
        self._thread.join()
        return self.shown


@pytest.fixture
def terminal(monkeypatch):
    """Put a terminal in the place of this process's streams; to be called in the test, for pytest puts its own before."""
    made = []

    def take():
        made.append(Terminal())
        for name, stream in zip(STREAMS, made[-1].streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(console, "_writer", console._Writer())
        return made[-1]

    yield take
    monkeypatch.undo()
    for terminal in made:
        terminal.lines()


def of_rank(rank, number):
    printed = [f"epoch {number}.{line} of {rank}" for line in range(1 + number % 7)]
    block = ["Traceback (most recent call last):", *(f'  File "*{line}", in {rank}' for line in range(number)), "E: 🙂"]
    return printed, block


def print_and_fail(folder, times=PAIRS):
    """Have two ranks print some lines and then fail, again and again; return what they wrote."""
    folder.mkdir(exist_ok=True)
    ranks = {0: ("[rank 0] ", False), 1: ("[rank 1] ", False)}
    reader = InLoop(Loop(), lambda: LogReader(str(folder), ranks, "", console.write_output))
    reader.start()
    written = {0: [], 1: []}
    with contextlib.ExitStack() as stack:
        files = {
            (rank, stream): stack.enter_context(open(pipe_path(str(folder), rank, stream), "wb", 0))
            for rank in (0, 1)
            for stream in STREAMS
        }
        for number in range(times):
            for rank in (0, 1):
                for stream, lines in zip(STREAMS, of_rank(rank, number), strict=True):
                    files[rank, stream].write(("\n".join(lines) + "\n").encode())
                    written[rank] += [f"[rank {rank}] {line}" for line in lines]
                reader.read_now(rank)
    reader.finish()
    reader.in_loop.stop()
    assert console.settle(60)
    return written


def shown_of(rank, lines):
    return [line for line in lines if line.startswith(f"[rank {rank}] ")]


def test_what_a_rank_prints_before_it_fails_stands_before_in_the_terminal(terminal, tmp_path):
    shown = terminal()
    written = print_and_fail(tmp_path)
    lines = shown.lines()
    assert {rank: shown_of(rank, lines) for rank in (0, 1)} == written


def test_blocks_of_two_nodes_on_one_terminal_stay_in_one_piece(terminal):
    shown = terminal()

    def write_all(node):
        own = console._Writer()
        for number in range(PAIRS):
            for stream, lines in zip(STREAMS, of_rank(node, number), strict=True):
                own.put(stream, "".join(f"[rank {node}] {line}\n" for line in lines).encode())
        assert own.settle(60)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write_all, "ab"))
    lines = shown.lines()
    for node in "ab":
        for number in range(PAIRS):
            printed, block = ([f"[rank {node}] {line}" for line in part] for part in of_rank(node, number))
            at = next(place for place in range(len(lines)) if lines[place : place + len(block)] == block)
            assert lines.index(printed[-1]) < at
            del lines[at : at + len(block)]  # blocks of the same length follow


def test_a_reader_of_the_other_stream_that_pauses_is_waited_for_once(terminal, monkeypatch):
    """For a second, and not before each of the lines that follow."""
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as paused:
        shown = terminal()
        monkeypatch.setattr(sys, "stdout", paused)
        assert console.write_text("stdout", "nobody reads this\n", 60)
        begin = time.monotonic()
        for number in range(20):
            assert console.write_text("stderr", f"event {number}\n", 60)
        assert time.monotonic() - begin < limit_s(10)
        assert shown.lines() == [f"event {number}" for number in range(20)]
