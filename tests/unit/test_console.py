"""Output reaches the task's own streams whole, at once, whatever they are, and waits for their reader as long as it takes."""

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from types import SimpleNamespace

import pytest
from metaflow.procpoll import make_poll
from metaflow.runtime import Worker
from unit_helpers import OURS, eventually

from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.logs import console
from metaflow_extensions.torchrun.plugins.torchrun.logs.console import settle, write_output, write_text

BLOCK = ("x" * 79 + "\n") * 1000  # more than a pipe holds


@pytest.fixture(autouse=True)
def writer(monkeypatch):
    """Have each test begin as a process does."""
    monkeypatch.setattr(console, "_writer", made := console._Writer())
    return made


class Stream:
    """A stdout of this process, and who reads it."""

    def __init__(self, reading, writing):
        self.reading, self.writing = reading, writing
        self.stdout = os.fdopen(writing, "w", encoding="utf-8")

    def text(self):
        """Return all that comes until stdout is closed."""
        with open(self.reading, encoding="utf-8") as file:
            return file.read()

    def read(self, size):
        """Return so much."""
        read = b""
        while len(read) < size:
            read += os.read(self.reading, size - len(read))
        return read


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


# --- streams that are no pipe ---------------------------------------------------------------------


def test_a_stream_of_the_steps_own_gets_the_text_even_if_it_has_a_file(tmp_path, monkeypatch):
    """As a notebook's, or one that writes to a file as well."""
    got = []
    with open(tmp_path / "below", "w") as below:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=below.fileno, write=got.append, flush=lambda: None))
        assert write_text("stdout", "größe\ntwo\n", 30)
    assert "".join(got) == "größe\ntwo\n"


def test_a_stdout_that_is_not_unicode_still_shows_every_line(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert write_text("stdout", "[rank 0] größe \ufffd\n", 30)
    assert narrow.buffer.getvalue() == b"[rank 0] gr\\xf6\\xdfe \\ufffd\n"


def test_lines_of_both_streams_that_go_to_one_file_do_not_mix(tmp_path, monkeypatch):
    with open(tmp_path / "out", "a", encoding="utf-8") as file, open(tmp_path / "out", "a", encoding="utf-8") as same:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", same)
        with ThreadPoolExecutor() as pool:
            for name, mark in (("stdout", "größe 🙂"), ("stderr", "b" * 100_000)) * 20:
                pool.submit(write_output, name, f"{mark}\n".encode())
        assert settle(30)
    lines = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert sorted(lines) == ["b" * 100_000] * 20 + ["größe 🙂"] * 20


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
            assert write_text("stdout", "unseen\n", 30)
    if reason == "Broken pipe":
        stream.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("[torchrun] stdout can't be written to (")
    assert reason in line


# --- one pipe for several nodes, and Metaflow at its other end ------------------------------------


@pytest.mark.parametrize("texts", [[1], [1, 1, 1], [2], [50, 1, 199], [1000], [5000, 3]])
def test_metaflow_shows_every_line_without_another_write(texts, take_stdout):
    """Its runtime takes many lines out of the pipe at once, and shows one each time that there is something in it."""
    stream = take_stdout()
    total = sum(texts)
    lines = [f"line {number} {'x' * 60}\n" for number in range(total)]
    shown, at = [], 0
    file = os.fdopen(stream.reading, "rb", 8192)  # as Worker._launch has it (2.19)
    worker = SimpleNamespace(_logs={stream.reading: (file, None)}, emit_log=lambda line, _: shown.append(line.decode()))
    poll = make_poll()
    poll.add(stream.reading)
    for count in texts:
        write_output("stdout", "".join(lines[at : at + count]).encode())
        at += count
    while len(shown) < total:
        events = list(poll.poll(5000))
        assert events, f"{total - len(shown)} lines were taken and not shown"
        Worker.read_logline(worker, stream.reading)
    file.close()
    assert shown == lines


LONG = f"""{OURS}
import os
from ours.logs import console
if sys.argv[2:]:
    sys.stderr = open(os.devnull, "w")  # so its stderr is no pipe
for number in range(300):
    console.write_output("stdout", sys.argv[1].encode() * 20_000 + b"\\n")
"""


def test_long_lines_do_not_mix_with_those_of_a_node_whose_other_stream_goes_elsewhere(take_stdout):
    stream, errors = take_stdout(), os.pipe()
    words = [("a",), ("b", "without stderr"), ("c",)]
    command = [sys.executable, "-c", LONG]
    nodes = [subprocess.Popen([*command, *each], stdout=stream.writing, stderr=errors[1]) for each in words]
    stream.stdout.close()
    with open(stream.reading, "rb") as pipe:
        lines = sorted(pipe.read().split())
    assert [node.wait(30) for node in nodes] == [0, 0, 0]
    assert lines == [mark * 20_000 for mark in (b"a", b"b", b"c") for _ in range(300)]
    for fd in errors:
        os.close(fd)


NODE = f"""{OURS}
import os
from ours.logs import console
for number in range(int(sys.argv[2])):
    console.write_output("stdout", f"{{sys.argv[1]}} {{number}} {{'x' * 1000}}\\n".encode())
if sys.argv[3:]:
    os.write(int(sys.argv[3]), b"!")  # all waits for its turn
"""


def test_nodes_that_print_much_get_turns_alike(take_stdout):
    stream = take_stdout()
    errors, queued = os.pipe(), os.pipe()  # Metaflow has two pipes, and so two locks
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, name, "5000", str(queued[1])],
            stdout=stream.writing,
            stderr=errors[1],
            pass_fds=[queued[1]],
        )
        for name in "abc"
    ]
    stream.stdout.close()
    for _ in nodes:
        assert os.read(queued[0], 1) == b"!"
    with open(stream.reading) as pipe:
        lines = list(pipe)
    assert [node.wait(30) for node in nodes] == [0, 0, 0]
    assert all([line.split()[1] for line in lines if line[0] == name] == list(map(str, range(5_000))) for name in "abc")
    counts = [sum(line[0] == name for line in lines[:6_000]) for name in "abc"]
    # 1514 to 2243 lines and 179 to 181 turns, also beside eight busy processes; there 66 lines and 3 turns without the queue.
    assert min(counts) > 1_000, counts
    assert len(list(groupby(line[0] for line in lines[:6_000]))) > 100
    for fd in errors + queued:
        os.close(fd)


def test_a_node_that_is_killed_in_its_turn_holds_up_no_other_even_if_a_fork_of_it_lives(take_stdout, tmp_path):
    stream = take_stdout()
    program = NODE + "if os.fork() == 0: signal.pause()\nconsole.settle()\n"
    node = subprocess.Popen(
        [sys.executable, "-c", program.replace("import os", "import os, signal"), "a", "300"],
        stdout=stream.writing,
        start_new_session=True,
    )
    stream.read(1000)  # the pipe is full, and the node in its turn
    eventually(lambda: len(psutil_children(node.pid)) == 1, "its fork")
    node.kill()
    node.wait()
    write_output("stdout", b"b\n")
    read = b""
    while not read.endswith(b"\nb\n"):
        read += os.read(stream.reading, 1_000_000)
    os.killpg(node.pid, signal.SIGKILL)


def psutil_children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


# --- readers that do not read ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [os.pipe, pty.openpty])
def test_a_stream_that_does_not_block_loses_nothing(kind, take_stdout):
    stream = take_stdout(kind)
    os.set_blocking(stream.writing, False)  # as Node.js leaves it, for all that have it
    texts = ["".join(f"line {n}\n" for n in range(begin, begin + 1_000)) for begin in range(0, 10_000, 1_000)]
    for text in texts:
        write_output("stdout", text.encode())
    read = b""
    while read.count(b"\n") < 10_000:
        read += os.read(stream.reading, 1000)  # slowly: the pipe is always full
    os.close(stream.reading)
    assert read.decode().replace("\r\n", "\n") == "".join(texts)


INTERRUPTED = f"""{OURS}
import random, signal, time
from ours.logs import console
class News(Exception): pass
def come(*_): raise News
signal.signal(signal.SIGALRM, come)
for _ in range(100):
    console._writer = console._Writer()
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 4e-4))
        console.write_output("stdout", b"interrupted\\n")
        time.sleep(0.01)
    except News:
        console.write_output("stdout", b"written\\n")
        assert console.settle(60)
"""


def test_a_signal_handler_that_raises_leaves_a_writer_that_writes():
    script = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (script.returncode, script.stderr) == (0, "")
    assert script.stdout.split().count("written") == 100


@pytest.mark.parametrize(("debug", "shown"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_details_are_written_where_they_are_wanted(debug, shown, monkeypatch, capfd):
    monkeypatch.delenv(console.DEBUG, raising=False)
    if debug is not None:
        monkeypatch.setenv(console.DEBUG, debug)
    console.to_log(Event("command", 1, "runs: torchrun", is_detail=True), 2)
    console.to_log(Event("note", 1, "news"), 2)
    console.to_log(Event("note", 0, "news of a single node"), 1)
    assert settle(30)
    detail = "[torchrun node 1] runs: torchrun\n" if shown else ""
    assert capfd.readouterr().err == f"{detail}[torchrun node 1] news\n[torchrun] news of a single node\n"
