"""Output is complete, in order, labelled, live, and does not fill the memory."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.logs import follower as logs
from metaflow_extensions.torchrun.plugins.torchrun.logs.lines import LineSplitter

# --- following files -------------------------------------------------------------------------------


class Screen:
    """Collects what a follower writes."""

    def __init__(self):
        self.streams = {"stdout": "", "stderr": ""}
        self.writes = []
        self._lock = threading.Lock()

    def write(self, stream, lines):
        text = lines.decode()
        with self._lock:
            assert not text or text.endswith("\n")
            self.writes.append(text)
            self.streams[stream] += text
        return True

    def lines(self, stream, label):
        return [line[len(label) :] for line in self.streams[stream].split("\n") if line.startswith(label)]


@pytest.fixture
def follow(tmp_path):
    """Return a function that starts a follower in the layout of torchrun's log folder, and where it writes."""
    started = []

    def start(label=lambda rank: f"[rank {rank}] ", screen=None, hold_report=False):
        agent = {stream: str(write(tmp_path / f"agent.{stream}", "")) for stream in ("stdout", "stderr")}
        screen = screen or Screen()
        started.append(logs.LogFollower(str(tmp_path), agent, label, "[agent] ", screen.write, hold_report))
        started[-1].start()
        return started[-1], screen

    yield start
    for follower in started:
        follower.finish()
        atexit.unregister(follower._await_thread)


def worker_file(root, rank, stream, attempt=0):
    return root / "launch0-0_x8 [odd]" / f"attempt_{attempt}" / str(rank) / f"{stream}.log"


WRITER = """
import sys
out, err = open(sys.argv[1], "ab", 0), open(sys.argv[2], "ab", 0)
for i in range(2000):
    out.write(b"out %d gr\\xc3\\xb6\\xc3" % i)   # cut inside of a character
    out.write(b"\\x9fe\\n")
    if i % 2:
        err.write(b"err %d \\xff\\r\\n" % i)
out.write(b"last words")
"""


def test_a_real_writer_is_followed_in_order_to_its_last_byte(follow, tmp_path):
    follower, screen = follow()
    paths = {rank: [write(worker_file(tmp_path, rank, s), "") for s in ("stdout", "stderr")] for rank in (0, 1)}
    writers = [subprocess.Popen([sys.executable, "-I", "-S", "-c", WRITER, *map(str, p)]) for p in paths.values()]
    for writer in writers:
        assert writer.wait(30) == 0
    follower.finish()
    for rank in (0, 1):
        label = f"[rank {rank}] "
        assert screen.lines("stdout", label) == [f"out {i} größe" for i in range(2000)] + ["last words"]
        assert screen.lines("stderr", label) == [f"err {i} \ufffd" for i in range(1, 2000, 2)]


def test_a_line_is_shown_while_the_writer_lives_and_an_unfinished_one_waits_for_its_end(follow, tmp_path):
    follower, screen = follow()
    path = write(worker_file(tmp_path, 3, "stderr"), "")
    with open(path, "ab", 0) as file:
        for number in range(3):
            file.write(b"whole %d\nhalf" % number)
            eventually(lambda n=number: f"whole {n}\n" in screen.streams["stderr"], "the line", 2.0)
            file.write(b" and half\n")
    follower.finish()
    expected = [line for number in range(3) for line in (f"whole {number}", "half and half")]
    assert screen.lines("stderr", "[rank 3] ") == expected
    assert screen.streams["stdout"] == ""


def test_a_hidden_rank_is_a_sign_of_life_and_the_agents_own_words_with_their_own_label_are_none(follow, tmp_path):
    follower, screen = follow(label=lambda rank: None if rank == 0 else f"[rank {rank}] ")
    (tmp_path / "agent.stderr").write_text("a warning\n")
    eventually(lambda: screen.streams["stderr"] == "[agent] a warning\n")
    assert follower.last_output_at is None
    begun = time.monotonic()
    write(worker_file(tmp_path, 0, "stdout"), "hidden, but alive\n")
    eventually(lambda: follower.last_output_at is not None)
    assert begun <= follower.last_output_at <= time.monotonic()
    assert follower.written_bytes() == len("hidden, but alive\n")
    write(worker_file(tmp_path, 1, "stdout"), "shown\n")
    follower.finish()
    assert screen.streams == {"stdout": "[rank 1] shown\n", "stderr": "[agent] a warning\n"}


class PausedScreen(Screen):
    """Takes over one text, as a pipe that is full then, and nothing more until it is continued."""

    def __init__(self):
        super().__init__()
        self.asked, self.continued = threading.Event(), threading.Event()

    def write(self, stream, lines):
        if lines:
            super().write(stream, lines)
        self.asked.set()
        return self.continued.wait(0.05)


def test_a_reader_that_does_not_read_holds_up_nobody_and_can_have_all_later(follow, tmp_path):
    follower, screen = follow(screen=PausedScreen())
    path = write(worker_file(tmp_path, 0, "stdout"), "first\n")
    assert screen.asked.wait(10)
    with path.open("a") as file:
        file.write("second\n")
    write(worker_file(tmp_path, 1, "stderr"), "of a file that nobody has opened yet\n")
    begun = time.monotonic()
    eventually(lambda: (follower.last_output_at or 0.0) >= begun, "a sign of life")  # it is no hang
    follower.finish()
    assert screen.streams == {"stdout": "[rank 0] first\n", "stderr": ""}
    shutil.rmtree(worker_file(tmp_path, 0, "stdout").parents[2])
    screen.continued.set()
    eventually(lambda: "torchrun-logs" not in {thread.name for thread in threading.enumerate()}, "its end")
    assert screen.streams["stdout"] == "[rank 0] first\n[rank 0] second\n"
    assert screen.streams["stderr"] == "[rank 1] of a file that nobody has opened yet\n"


def test_a_file_that_can_not_be_opened_for_a_while_is_read_later(follow, tmp_path, monkeypatch):
    follower, screen = follow()
    made, tried = logs.FollowedFile, threading.Event()

    def too_many(*_):
        tried.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(logs, "FollowedFile", too_many)
    write(worker_file(tmp_path, 0, "stdout"), "patience\n")
    assert tried.wait(10)
    monkeypatch.setattr(logs, "FollowedFile", made)
    follower.finish()
    assert screen.streams == {"stdout": "[rank 0] patience\n", "stderr": ""}


def test_the_files_of_an_agents_own_restart_are_followed_as_soon_as_they_come(follow, tmp_path):
    follower, screen = follow()
    for attempt in range(3):
        path = worker_file(tmp_path, 0, "stdout", attempt)
        os.makedirs(path.parent)  # as torchrun does, some time before there are files
        path.write_text(f"of attempt {attempt}\n")
        eventually(lambda n=attempt: f"[rank 0] of attempt {n}\n" in screen.streams["stdout"], "the line", 2.0)
    follower.finish()
    assert screen.lines("stdout", "[rank 0] ") == [f"of attempt {attempt}" for attempt in range(3)]


@pytest.mark.parametrize("spoil", [os.unlink, lambda path: os.truncate(path, 0)], ids=["deleted", "truncated"])
def test_a_file_that_somebody_deletes_or_truncates_is_read_to_what_the_worker_writes_last(spoil, follow, tmp_path):
    follower, screen = follow()
    path = write(worker_file(tmp_path, 0, "stdout"), "")
    with open(path, "wb", 0) as file:  # it has a place in the file, as a worker's stdout has
        file.write(b"before\n")
        eventually(lambda: "before" in screen.streams["stdout"])
        spoil(path)
        file.write(b"after\n")
        eventually(lambda: "after" in screen.streams["stdout"])
        file.write(b"at the end\n")
    follower.finish()
    assert screen.lines("stdout", "[rank 0] ") == ["before", "after", "at the end"]


@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"word", b"\x00", b"\xff", "größe".encode()])).map(b"".join),
    st.integers(1, 9),
)
def test_every_line_has_its_label_and_is_counted(data, chunk_bytes):
    shown = []
    with pytest.MonkeyPatch.context() as patched, tempfile.NamedTemporaryFile() as written:
        patched.setattr(logs, "_CHUNK_BYTES", chunk_bytes)
        written.write(data)
        written.flush()
        file = logs.FollowedFile(written.name, "[rank 0] ", "stdout")
        file.finish(lambda _, lines: shown.append(lines), show_held=True)
        file.close()
    splitter = LineSplitter()
    lines = (splitter.feed(data) + splitter.feed(b"", final=True)).split(b"\n")[:-1]
    assert b"".join(shown) == b"".join(b"[rank 0] %s\n" % line for line in lines)


# --- what it costs --------------------------------------------------------------------------------


@pytest.fixture
def look(tmp_path):
    """Return a function that makes a follower without its thread: the test looks."""
    made = []

    def make(screen):
        made.append(logs.LogFollower(str(tmp_path), {}, "[rank {}] ".format, "", screen.write))
        return made[-1]._look

    yield make
    for follower in made:
        for file in follower._files:
            file.close()


def test_a_look_at_workers_that_write_nothing_lists_no_folder_of_theirs(look, tmp_path, monkeypatch):
    for rank in range(8):
        for stream in ("stdout", "stderr"):
            write(worker_file(tmp_path, rank, stream), "")
    screen, asked = Screen(), []
    follower_looks = look(screen)
    follower_looks()
    for name in ("listdir", "scandir", "stat", "open"):
        usual = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda path, *args, usual=usual, **more: asked.append(path) or usual(path, *args, **more)
        )
    follower_looks()
    attempt = worker_file(tmp_path, 0, "stdout").parents[1]
    assert asked == [str(tmp_path), str(attempt.parent), str(attempt)]
    assert not screen.writes


def test_looks_are_seldom_but_in_a_flood_and_a_line_never_waits_for_half_a_second(look, tmp_path):
    pauses, sizes = [], [0, 1_000, 100_000, 100_000, 1_000, 0]
    path = write(worker_file(tmp_path, 0, "stdout"), "")

    def wait(pause_s):
        pauses.append(pause_s)
        with path.open("a") as file:
            file.write("x" * sizes[len(pauses) - 1])
        return len(pauses) == len(sizes)

    follower = look(Screen()).__self__
    follower._stop.wait = wait
    follower._follow()
    assert pauses == [0.4, 0.4, 0.4, 0.05, 0.05, 0.4]


def test_a_loud_rank_and_a_quiet_one_are_shown_in_turns_in_one_look(look, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_CHUNK_BYTES", 70)
    write(worker_file(tmp_path, 0, "stdout"), "loud..\n" * 35)
    write(worker_file(tmp_path, 1, "stdout"), "quiet.\n" * 11)
    screen = Screen()
    follower_looks = look(screen)
    follower_looks()
    assert [text.count("quiet") for text in screen.writes] == [0, 10, 0, 1, 0, 0, 0]
    assert screen.streams["stdout"].count("loud") == 35
    assert [bool(text) for text in screen.writes] == [True] * 6 + [False]  # it tells when no more comes for now


FAILED = [
    "E1121 18:00:00.123456 77 torch/api.py:1010] failed (exitcode: 1)",
    "Traceback (most recent call last):",
    "===",
]
STORE_GONE = [
    "[W1121 18:44:10.840641713 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3): Failed to recv",
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f0814379b8d in libc10.so)",
    "E1121 18:44:10.792000 1227 torch/api.py:1010] Error waiting on exit barrier. Elapsed: 1 seconds",
]


@pytest.mark.parametrize("explained", [True, False])
@pytest.mark.parametrize(
    "box", [FAILED, STORE_GONE], ids=["a worker failed", "the store has ended in the exit barrier"]
)
def test_the_agents_report_of_a_failure_is_shown_where_nobody_knows_better(follow, tmp_path, box, explained):
    follower, screen = follow(hold_report=True)
    write(tmp_path / "agent.stderr", "\n".join(["W1121 a warning", *box]))
    eventually(lambda: screen.streams["stderr"] == "[agent] W1121 a warning\n")
    follower.finish(explained)
    assert screen.lines("stderr", "[agent] ") == ["W1121 a warning", *([] if explained else box)]


def test_only_workers_logs_are_taken_for_workers_logs_below_a_folder_of_any_name(tmp_path):
    root = tmp_path / "a[b]*c"
    assert not os.path.exists(logs.worker_folder(str(root), 11))
    for stream in ("stdout", "stderr"):
        write(worker_file(root, 11, stream), "")
    for name in ("0/error.json", "0/stdfoo.log", "tmp/stdout.log"):
        write(root / "run_x" / "attempt_0" / name, "")
    found = list(logs.new_logs(str(root), ()))
    assert [(rank, stream) for _, rank, stream in found] == [(11, "stderr"), (11, "stdout")]
    assert list(logs.new_logs(str(root), {found[0][0]})) == found[1:]
    assert os.path.isdir(logs.worker_folder(str(root), 11))


@pytest.mark.parametrize(
    ("piece", "seen"),
    [
        (b"x" * 99 + b"\n", 11_880_000),
        (b"x" * 100, 12_000_000),
        (b"\r" + b"x" * 99, 99),
        (b"\xff" * 99 + b"\n", 11_880_000),
    ],
    ids=["lines", "one line", "progress", "binary"],
)
def test_twelve_megabytes_do_not_fill_the_memory(piece, seen, tmp_path):
    path, shown = tmp_path / "stdout.log", []
    path.write_bytes(piece * 120_000)
    file = logs.FollowedFile(str(path), "> ", "stdout")
    tracemalloc.start()
    file.finish(lambda _, lines: shown.append(sum(len(line) - 2 for line in lines.decode().splitlines())), True)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    file.close()
    assert sum(shown) == seen
    assert most < 8_000_000
