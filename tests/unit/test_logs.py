"""What workers write is complete, in order, labelled, live, and does not fill the memory."""

import time

import pytest
from loops import InLoop, Loop
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.supervisor import pipes
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.pipes import AGENT, LogReader, pipe_path

RANKS = {rank: (f"[rank {rank}] ", False) for rank in (0, 1, 3)}


class Screen:
    """Collects what a reader hands over."""

    def __init__(self):
        self.streams = {"stdout": "", "stderr": ""}

    def write(self, stream, lines):
        text = lines.decode()
        assert not text or text.endswith("\n")
        self.streams[stream] += text
        return True

    def lines(self, stream, label):
        return [line[len(label) :] for line in self.streams[stream].split("\n") if line.startswith(label)]


@pytest.fixture
def read(tmp_path):
    """Return a function that starts a reader; it returns that, and where it writes."""
    started = []

    def start(workers=RANKS, **options):
        screen = Screen()
        make = lambda: LogReader(str(tmp_path), workers, "[agent] ", screen.write, **options)  # noqa: E731
        started.append(InLoop(Loop(), make))
        started[-1].start()
        return started[-1], screen

    yield start
    for reader in started:
        reader.finish()
        reader.in_loop.stop()


def opened(folder, process, stream):
    return open(pipe_path(str(folder), process, stream), "wb", buffering=0)


def test_a_hidden_rank_is_a_sign_of_life_and_shows_its_last_lines_if_it_fails(read, tmp_path):
    reader, screen = read({0: ("[rank 0] ", True), 1: ("[rank 1] ", True)})
    with opened(tmp_path, AGENT, "stderr") as agent:
        agent.write(b"a warning\n")
    eventually(lambda: screen.streams["stderr"] == "[agent] a warning\n")
    assert reader.last_output_at is None
    begun = time.monotonic()
    with opened(tmp_path, 0, "stdout") as out, opened(tmp_path, 0, "stderr") as err:
        out.write(b"".join(b"line %d\n" % number for number in range(500)))
        reader.read_now(0)
        err.write(b"Traceback\nError\n")
    assert begun <= reader.last_output_at <= time.monotonic()
    assert screen.streams == {"stdout": "", "stderr": "[agent] a warning\n"}
    reader.read_now(0, failed=True)
    assert screen.lines("stdout", "[rank 0] ") == [f"line {number}" for number in range(400, 500)]
    assert screen.lines("stderr", "[rank 0] ") == ["Traceback", "Error"]


# --- several ranks --------------------------------------------------------------------------------


def test_torchs_own_label_of_a_rank_does_not_follow_ours(read, tmp_path, monkeypatch):
    """Whatever cuts it; another rank's, and one within a line, is text."""
    monkeypatch.setattr(pipes, "_CHUNK_BYTES", 13)
    lines = ["[rank3]: Traceback:", "[rank3]:   File", "", "[rank3]:[W1121 TCPStore]", "see [rank3]: x", "[rank33]: x"]
    reader, screen = read()
    for stream in ("stdout", "stderr"):
        with opened(tmp_path, 3, stream) as pipe:
            pipe.write(("\n".join(lines) + "\n").encode())
    reader.finish()
    expected = ["Traceback:", "  File", "", "[W1121 TCPStore]", "see [rank3]: x", "[rank33]: x"]
    assert screen.lines("stderr", "[rank 3] ") == expected
    assert screen.lines("stdout", "[rank 3] ") == lines  # nobody but the script has written it


# The store has ended in the exit barrier.
REPORT = [
    "[W1121 18:44:10.840641713 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3): Failed to recv",
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f0814379b8d in libc10.so)",
    "E1121 18:44:10.792000 1227 torch/api.py:1010] Error waiting on exit barrier. Elapsed: 1 seconds",
]


@pytest.mark.parametrize("explained", [True, False])
def test_the_agents_report_of_a_failure_is_shown_where_nobody_knows_better(read, tmp_path, explained):
    reader, screen = read(holds_report=True)
    with opened(tmp_path, AGENT, "stderr") as agent:
        agent.write("\n".join(["W1121 a warning", *REPORT]).encode())
        eventually(lambda: screen.streams["stderr"] == "[agent] W1121 a warning\n")
    assert REPORT[0] in reader.tail(AGENT, "stderr")
    reader.finish(explained)
    assert screen.lines("stderr", "[agent] ") == ["W1121 a warning", *([] if explained else REPORT)]
