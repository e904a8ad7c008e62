"""Output reaches the task's own streams whole, at once, whatever they are, and waits for their reader as long as it takes."""

import contextlib
import ctypes
import io
import os
import pty
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from types import SimpleNamespace

import pytest
from limits import limit_s
from metaflow.procpoll import make_poll
from metaflow.runtime import Worker
from unit_helpers import HANG_S, OURS, eventually

from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.logs import console
from metaflow_extensions.torchrun.plugins.torchrun.logs.console import settle, write_output, write_text
from metaflow_extensions.torchrun.plugins.torchrun.logs.shared_pipe import SharedPipe

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


def test_lines_never_go_to_another_file_that_has_got_the_number_of_a_closed_one(take_stdout, tmp_path, monkeypatch):
    """The step's code may close its own file while the writer waits for its turn."""
    stream = take_stdout()
    number, flush = stream.stdout.fileno(), console._flush

    def close_it(target):
        flush(target)
        stream.stdout.close()
        (tmp_path / "model.bin").touch()
        assert os.open(tmp_path / "model.bin", os.O_RDWR) == number, "the lowest number that is free"

    monkeypatch.setattr(console, "_flush", close_it)
    try:
        assert write_text("stdout", "a line\n", 30)
        assert (tmp_path / "model.bin").read_bytes() == b""
        assert stream.read(7) == b"a line\n"
    finally:
        os.close(number)
        os.close(stream.reading)


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


def test_who_has_had_its_turn_holds_up_nobody_even_if_a_fork_has_its_files(take_stdout):
    """One past Python's own, as a library in C may make it."""
    stream = take_stdout()
    with SharedPipe().turn(stream.writing):
        fork = ctypes.CDLL(None).fork()
        if fork == 0:
            signal.pause()
    node = subprocess.Popen([sys.executable, "-c", NODE, "b", "1"], stdout=stream.writing)
    try:
        assert node.wait(limit_s(HANG_S)) == 0
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        node.kill()
    assert os.read(stream.reading, 100).startswith(b"b 0 xx")


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


def test_a_reader_that_does_not_read_is_not_waited_for_again_and_again(take_stdout):
    stream = take_stdout()
    write_text("stdout", "aaa\n", 30)
    begun = time.monotonic()
    assert write_text("stdout", "b\n" * 200, 60)
    assert time.monotonic() - begun < 5.0  # 200 lines at 0.05 s each would be 10 s
    stream.stdout.close()
    assert stream.text() == "aaa\n" + "b\n" * 200


AT_THE_END = f"""{OURS}
import os
from ours.logs import console
console.write_text("stderr", ("x" * 79 + "\\n") * 1000, 0.0)
child = os.fork()
if child:
    console.write_text("stderr", "last\\n", 0.0)
    os.waitpid(child, 0)
    exec(sys.argv[1])
    print(flush=True)
"""


def at_its_end(reading, writing, code=""):
    script = subprocess.Popen([sys.executable, "-c", AT_THE_END, code], stdout=subprocess.PIPE, stderr=writing)
    os.close(writing)
    assert script.stdout.readline() == b"\n"
    script.stdout.close()
    return script, open(reading, encoding="utf-8")


def test_what_waits_for_a_reader_is_written_once_at_the_end_and_not_by_a_child():
    script, pipe = at_its_end(*os.pipe())
    time.sleep(0.5)  # it would have ended by now
    assert script.poll() is None
    with pipe:
        assert pipe.read() == BLOCK + "last\n"
    assert script.wait(30) == 0


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
