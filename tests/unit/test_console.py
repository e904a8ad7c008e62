"""Output reaches the task's own streams whole, at once, whatever they are."""

import contextlib
import fcntl
import io
import os
import pty
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from metaflow.procpoll import make_poll
from metaflow.runtime import Worker
from unit_helpers import OURS

from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.logs import console
from metaflow_extensions.torchrun.plugins.torchrun.logs.console import write_output, write_text

BLOCK = ("x" * 79 + "\n") * 1000  # more than a pipe holds


@pytest.fixture(autouse=True)
def outputs(monkeypatch):
    """Have each test begin as a process does."""
    monkeypatch.setattr(console, "_outputs", {name: console._Output(name) for name in ("stdout", "stderr")})


@pytest.fixture
def side():
    """Run functions beside the test."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


class Stream:
    """A stdout of this process, who reads it, and another node that writes to it."""

    def __init__(self, reading, writing):
        self.reading, self.writing = reading, writing
        self.stdout = os.fdopen(writing, "w", encoding="utf-8")

    def is_free(self):
        """Return whether another node may write."""
        other = os.open(f"/proc/self/fd/{self.writing}", os.O_RDWR)  # to open it to write alone waits for a reader
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(other)

    def text(self):
        """Return all that comes until stdout is closed."""
        with open(self.reading, encoding="utf-8") as file:
            return file.read()


@pytest.fixture
def take_stdout(monkeypatch):
    """Return a function that puts a stream in stdout's place; to be called in the test, for pytest puts its own before it."""
    with contextlib.ExitStack() as streams:

        def take(kind=os.pipe):
            stream = Stream(*kind())
            streams.callback(stream.stdout.close)
            monkeypatch.setattr(sys, "stdout", stream.stdout)
            return stream

        yield take


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_goes_to_the_stream_of_its_name_at_once(name, capfd):
    write_text(name, "[rank 0] größe\n")
    assert capfd.readouterr()._asdict() == {"out": "", "err": "", f"{name[3:]}": "[rank 0] größe\n"}


# --- streams that are no pipe ---------------------------------------------------------------------


def test_a_stream_of_the_steps_own_gets_the_text_even_if_it_has_a_file(tmp_path, monkeypatch):
    """As a notebook's, or one that writes to a file as well."""
    got = []
    with open(tmp_path / "below", "w") as below:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=below.fileno, write=got.append, flush=lambda: None))
        assert write_text("stdout", "größe\ntwo\n")
    assert "".join(got) == "größe\ntwo\n"


def test_a_stdout_that_is_not_unicode_still_shows_every_line(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    write_text("stdout", "[rank 0] größe \ufffd\n")
    assert narrow.buffer.getvalue() == b"[rank 0] gr\\xf6\\xdfe \\ufffd\n"


def test_a_file_gets_all(tmp_path, monkeypatch):
    text = "größe 🙂\n" * 50_000
    with open(tmp_path / "out", "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert write_text("stdout", text)
    assert (tmp_path / "out").read_text(encoding="utf-8") == text


def spoiled(spoil, **options):
    stream = open(os.open(os.devnull, os.O_WRONLY), "w", **options)  # noqa: SIM115
    spoil(stream)
    return stream


def without_reader():
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w")


@pytest.mark.parametrize(
    ("open_stream", "reason"),
    [
        (lambda: spoiled(lambda stream: os.close(stream.fileno()), closefd=False), "Bad file descriptor"),
        (lambda: spoiled(lambda stream: stream.close()), "closed file"),
        (lambda: None, "there is no stdout"),
        (without_reader, "Broken pipe"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_stream_that_can_not_be_written_to_is_said_once_and_stops_nobody(open_stream, reason, monkeypatch, capfd):
    stream = open_stream()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        for _ in range(3):
            assert write_text("stdout", "unseen\n")
    if reason == "Broken pipe":
        stream.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("[torchrun] stdout can't be written to (")
    assert reason in line


# --- one pipe for several nodes, and Metaflow at its other end ------------------------------------


@pytest.mark.parametrize("more_follows", [False, True])
@pytest.mark.parametrize("texts", [[1], [1, 1, 1], [2], [50, 1, 199], [1000], [5000, 3]])
def test_metaflow_shows_every_line_without_another_write(texts, more_follows, take_stdout, side):
    """Its runtime takes many lines out of the pipe at once, and shows one each time that there is something in it."""
    stream = take_stdout()
    total = sum(texts)
    lines = [f"line {number} {'x' * 60}\n" for number in range(total)]
    shown, at = [], 0
    file = os.fdopen(stream.reading, "rb", 8192)  # as Worker._launch has it (2.19)
    worker = SimpleNamespace(_logs={stream.reading: (file, None)}, emit_log=lambda line, _: shown.append(line.decode()))
    poll = make_poll()
    poll.add(stream.reading)
    written = []
    for count in texts:
        written.append(side(write_output, "stdout", "".join(lines[at : at + count]).encode(), 3.0, more_follows))
        at += count
    written.append(side(lambda texts: all(text.result() for text in texts) and write_output("stdout", b""), written[:]))
    while len(shown) < total:
        events = list(poll.poll(5000))
        assert events, f"{total - len(shown)} lines were taken and not shown"
        Worker.read_logline(worker, stream.reading)
    file.close()
    assert all(done.result() for done in written)
    assert sorted(shown) == sorted(lines)


def test_nobody_waits_for_the_reader_while_more_follows_and_only_the_last_line_is_kept_for_it(take_stdout, monkeypatch):
    stream, waits = take_stdout(), []
    monkeypatch.setattr(console, "await_reader", waits.append)
    for text, written in [(b"a\nb\n", b"a\n"), (b"c\n", b"b\n"), (b"d\n", b"c\n"), (b"e\nf\ng\n", b"d\ne\nf\n")]:
        assert write_output("stdout", text, more_follows=True)
        assert os.read(stream.reading, 100) == written
        assert stream.is_free()
    assert not waits
    assert write_output("stdout", b"")
    assert len(waits) == 1
    stream.stdout.close()
    assert stream.text() == "g\n"


def test_long_lines_of_nodes_on_one_pipe_do_not_mix_even_where_the_reader_is_slower_than_their_patience(
    take_stdout, side
):
    stream = take_stdout()

    def write(mark):
        node, lines = console._Output("stdout"), mark.encode() * 200_000 + b"\n"
        while not node.write(lines, 0.05):
            lines = b""

    writers = [side(write, mark) for mark in "abc"]
    read = b""
    while len(read) < 600_003:
        time.sleep(0.005)
        read += os.read(stream.reading, 4096)
    for writer in writers:
        writer.result()
    assert sorted(read.split(b"\n")) == [b"", *(mark * 200_000 for mark in (b"a", b"b", b"c"))]


def test_a_line_that_a_paused_reader_has_begun_to_read_is_ended_before_another_node_writes(take_stdout, side):
    stream, nodes = take_stdout(), [console._Output("stdout") for _ in "ab"]
    assert not nodes[0].write(b"a" * 100_000 + b"\n", 0.1)
    assert not nodes[1].write(b"b" * 100_000 + b"\n", 0.1)
    waits = side(nodes[1].write, b"", 30)
    read = side(stream.text)
    assert nodes[0].write(b"", 30)
    assert waits.result()
    stream.stdout.close()
    assert read.result() == "a" * 100_000 + "\n" + "b" * 100_000 + "\n"


def test_a_line_that_nobody_will_read_to_its_end_holds_up_no_other_node(take_stdout, capfd):
    stream = take_stdout()
    assert not write_text("stdout", "a" * 100_000 + "\n", 0.1)
    assert not stream.is_free()
    os.close(stream.reading)
    assert write_output("stdout", b"")
    assert "stdout can't be written to" in capfd.readouterr().err, "the rest is dropped"
    assert stream.is_free()


def test_what_another_node_holds_up_is_written_at_the_end_though_lines_may_mix(take_stdout, side, monkeypatch):
    monkeypatch.setattr(console, "_STUCK_S", 0.3)
    stream, nodes = take_stdout(), [console._Output("stdout") for _ in "ab"]
    assert not nodes[0].write(b"a" * 100_000 + b"\n", 0.1)
    assert not nodes[1].write(b"b\n", 0.1)
    at_end = side(nodes[1].finish)
    while nodes[1]._takes_turns and not at_end.done():
        time.sleep(0.001)
    read = side(stream.text)
    at_end.result()
    nodes[0].finish()
    stream.stdout.close()
    assert sorted(read.result()) == ["\n"] * 2 + ["a"] * 100_000 + ["b"]


# --- readers that do not read ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [os.pipe, pty.openpty])
def test_a_stream_that_does_not_block_loses_nothing(kind, take_stdout, side):
    stream = take_stdout(kind)
    os.set_blocking(stream.writing, False)  # as Node.js leaves it, for all that have it
    texts = ["".join(f"line {n}\n" for n in range(begin, begin + 1_000)) for begin in range(0, 10_000, 1_000)]
    written = side(lambda: [write_text("stdout", text, 60) for text in texts])
    read = b""
    while read.count(b"\n") < 10_000:
        read += os.read(stream.reading, 1000)  # slowly: the pipe is always full
    os.close(stream.reading)
    assert all(written.result())
    assert read.decode().replace("\r\n", "\n") == "".join(texts)


def test_a_reader_that_does_not_read_is_not_waited_for_again_and_again(take_stdout):
    stream = take_stdout()
    write_text("stdout", "aaa\n")
    begun = time.monotonic()
    assert write_text("stdout", "b\n" * 200)
    assert time.monotonic() - begun < 5.0  # 200 lines at 0.05 s each would be 10 s
    stream.stdout.close()
    assert stream.text() == "aaa\n" + "b\n" * 200


def test_a_reader_that_pauses_has_whole_lines(take_stdout):
    stream = take_stdout()
    assert not write_text("stdout", BLOCK, 0.1)
    assert os.read(stream.reading, len(BLOCK)).endswith(b"x\n")


def test_nobody_waits_for_a_reader_that_does_not_read_and_it_can_have_all_later(take_stdout, side):
    stream = take_stdout()
    begun = time.monotonic()
    assert not write_text("stdout", BLOCK, 0.1)
    waits = side(write_text, "stdout", "waits\n", 60)
    while not console._outputs["stdout"]._turn.locked():
        time.sleep(0.001)
    assert not write_text("stdout", "event 1\n", 0.1)
    assert not write_text("stdout", "event 2\n", 0.1)
    assert 0.3 <= time.monotonic() - begun < 3.0
    read = side(stream.text)
    assert waits.result()
    assert write_text("stdout", "late\n", 30)
    stream.stdout.close()
    assert read.result() == BLOCK + "waits\nevent 1\nevent 2\nlate\n"


AT_THE_END = f"""{OURS}
import os
from ours.logs.console import write_text
assert not write_text("stderr", ("x" * 79 + "\\n") * 1000, 0.0)
child = os.fork()
if child:
    write_text("stderr", "last\\n", 0.0)
    print(flush=True)  # now it is read, while the child ends
    os.waitpid(child, 0)
"""


def test_what_waits_for_a_reader_is_written_once_at_the_end_and_not_by_a_child():
    reading, writing = os.pipe()
    script = subprocess.Popen([sys.executable, "-c", AT_THE_END], stdout=subprocess.PIPE, stderr=writing)
    os.close(writing)
    assert script.stdout.readline() == b"\n"
    with open(reading, encoding="utf-8") as pipe:
        assert pipe.read() == BLOCK + "last\n"
    script.communicate()


@pytest.mark.parametrize(("debug", "shown"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_details_are_written_where_they_are_wanted(debug, shown, monkeypatch, capfd):
    monkeypatch.delenv(console.DEBUG, raising=False)
    if debug is not None:
        monkeypatch.setenv(console.DEBUG, debug)
    console.to_log(Event("command", 1, "runs: torchrun", is_detail=True))
    console.to_log(Event("note", 1, "news"))
    detail = "[torchrun node 1] runs: torchrun\n" if shown else ""
    assert capfd.readouterr().err == f"{detail}[torchrun node 1] news\n"
