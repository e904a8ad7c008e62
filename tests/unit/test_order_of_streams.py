"""What a rank wrote to stdout stands before what it wrote to stderr after that, and a block on stderr in one piece."""

import contextlib
import io
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from metaflow.mflog.mflog import merge_logs
from metaflow.procpoll import make_poll
from metaflow.runtime import Worker
from test_logs import worker_file
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.logs import console
from metaflow_extensions.torchrun.plugins.torchrun.logs import follower as logs

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
        monkeypatch.setattr(console, "_outputs", outputs())
        return made[-1]

    yield take
    monkeypatch.undo()
    for terminal in made:
        terminal.lines()


def outputs():
    return {name: console._Output(name) for name in ("stdout", "stderr")}


def as_executor(stream, lines):
    return console.write_output(stream, lines, more_follows=bool(lines))


def of_rank(rank, number):
    printed = [f"epoch {number}.{line} of {rank}" for line in range(1 + number % 7)]
    block = ["Traceback (most recent call last):", *(f'  File "*{line}", in {rank}' for line in range(number)), "E: 🙂"]
    return printed, block


def print_and_fail(folder, times=PAIRS):
    """Have two ranks print some lines and then fail, again and again, with a look after each; return what they wrote."""
    follower = logs.LogFollower(str(folder), {}, "[rank {}] ".format, "", as_executor)
    for rank in (0, 1):
        for stream in STREAMS:
            write(worker_file(folder, rank, stream), "")
    written = {0: [], 1: []}
    for number in range(times):
        for rank in (0, 1):
            for stream, lines in zip(STREAMS, of_rank(rank, number), strict=True):
                with worker_file(folder, rank, stream).open("a") as file:
                    file.write("\n".join(lines) + "\n")
                written[rank] += [f"[rank {rank}] {line}" for line in lines]
        follower._look()
    follower._stop.set()
    follower._follow()
    return written


def shown_of(rank, lines):
    return [line for line in lines if line.startswith(f"[rank {rank}] ")]


def test_what_a_rank_prints_before_it_fails_stands_before_in_the_terminal(terminal, tmp_path):
    shown = terminal()
    written = print_and_fail(tmp_path)
    lines = shown.lines()
    assert {rank: shown_of(rank, lines) for rank in (0, 1)} == written


def test_and_in_the_stored_logs_of_a_pod_by_the_times_of_their_lines(monkeypatch, tmp_path):
    """There each stream goes to a process of Metaflow's own, which notes the times (2.19)."""
    tees = []
    for name in STREAMS:
        tee = [sys.executable, "-m", "metaflow.mflog.tee", "task", str(tmp_path / name)]
        tees.append(subprocess.Popen(tee, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        monkeypatch.setattr(sys, name, io.TextIOWrapper(tees[-1].stdin))
    monkeypatch.setattr(console, "_outputs", outputs())
    for name in STREAMS:
        eventually((tmp_path / name).exists, "Metaflow's process", 60)
    written = print_and_fail(tmp_path / "folder")
    for name, tee in zip(STREAMS, tees, strict=True):
        getattr(sys, name).close()
        assert tee.wait(60) == 0
    lines = [line.msg.decode() for line in merge_logs([(tmp_path / name).read_bytes() for name in STREAMS])]
    assert {rank: shown_of(rank, lines) for rank in (0, 1)} == written


def test_blocks_of_two_nodes_on_one_terminal_stay_in_one_piece(terminal):
    shown = terminal()

    def write_all(node):
        own = outputs()
        for number in range(PAIRS):
            for stream, lines in zip(STREAMS, of_rank(node, number), strict=True):
                assert own[stream].write("".join(f"[rank {node}] {line}\n" for line in lines).encode(), 60)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write_all, "ab"))
    lines = shown.lines()
    for node in "ab":
        for number in range(PAIRS):
            printed, block = ([f"[rank {node}] {line}" for line in part] for part in of_rank(node, number))
            at = next(place for place in range(len(lines)) if lines[place : place + len(block)] == block)
            assert lines.index(printed[-1]) < at
            del lines[at : at + len(block)]  # blocks of the same length follow


@pytest.fixture
def look(tmp_path):
    """Return a function that returns what looks once, and what it has shown by stream; `then` follows on each text."""
    made, shown = [], {"": "", **dict.fromkeys(STREAMS, "")}  # "": of both

    def start(then=lambda text: None):
        def show(stream, lines):
            for name in ("", stream):
                shown[name] += lines.decode()
            then(lines.decode())
            return True

        made.append(logs.LogFollower(str(tmp_path), {}, "[rank {}] ".format, "", show))
        return made[-1]._look, shown

    yield start
    for file in made[0]._files:
        file.close()


def test_what_is_written_while_stdout_is_read_waits_for_what_was_printed_before_it(look, tmp_path):
    files = {stream: write(worker_file(tmp_path, 0, stream), f"first {stream}\n") for stream in STREAMS}

    def write_more(text):
        for stream, file in files.items() if "first stdout" in text else ():
            file.write_text(f"first {stream}\nsecond {stream}\n")

    looks, shown = look(write_more)
    looks()
    first = "[rank 0] first stdout\n[rank 0] first stderr\n"
    assert shown[""] == first
    looks()
    assert shown[""] == first + first.replace("first", "second")


@pytest.mark.parametrize(("is_cut", "shown_lines"), [(False, 100), (True, 8)])
def test_a_rank_that_has_printed_much_is_shown_to_its_traceback_first(is_cut, shown_lines, look, tmp_path, monkeypatch):
    """A stdout that is cut to nothing meanwhile does not hold back stderr."""
    monkeypatch.setattr(logs, "_CHUNK_BYTES", 64)
    out = write(worker_file(tmp_path, 0, "stdout"), "printed\n" * 100)
    write(worker_file(tmp_path, 0, "stderr"), "Traceback\n")
    looks, shown = look(lambda text: is_cut and os.truncate(out, 0))
    looks()
    assert shown[""] == "[rank 0] printed\n" * shown_lines + "[rank 0] Traceback\n"


def test_torchs_own_label_of_a_rank_does_not_follow_ours(look, tmp_path, monkeypatch):
    """Whatever cuts it; another rank's, and one within a line, is text."""
    monkeypatch.setattr(logs, "_CHUNK_BYTES", 13)
    lines = ["[rank3]: Traceback:", "[rank3]:   File", "", "[rank3]:[W1121 TCPStore]", "see [rank3]: x", "[rank33]: x"]
    for stream in STREAMS:
        write(worker_file(tmp_path, 3, stream), "\n".join(lines) + "\n")
    looks, shown = look()
    looks()
    expected = ["Traceback:", "  File", "", "[W1121 TCPStore]", "see [rank3]: x", "[rank33]: x"]
    assert shown["stderr"] == "".join(f"[rank 3] {line}\n" for line in expected)
    assert shown["stdout"] == "".join(f"[rank 3] {line}\n" for line in lines)  # nobody but the script has written it


def test_a_reader_of_the_other_stream_that_does_not_read_is_waited_for_once(terminal, monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as paused, open(os.devnull, "w") as null:
        terminal_of = terminal()
        monkeypatch.setattr(sys, "stdout", paused)
        assert console.write_output("stdout", b"nobody reads this\n")
        waited = []
        monkeypatch.setattr(
            console, "await_reader", lambda fd, *patience: waited.append(fd) or console.unread_bytes(fd)
        )
        for number in range(20):
            assert console.write_output("stderr", b"event %d\n" % number)
        assert waited.count(writing) == 1
        assert os.read(reading, 100) == b"nobody reads this\n"  # it goes on, so it is waited for again
        assert console.write_output("stdout", b"nor this\n")
        for number in range(20, 40):
            assert console.write_output("stderr", b"event %d\n" % number)
        assert waited.count(writing) == 2 + 1
        monkeypatch.setattr(sys, "stdout", null)
        assert terminal_of.lines() == [f"event {number}" for number in range(40)]
    os.close(reading)
