"""Output reaches the task's own streams whole, at once, whatever they are."""

import fcntl
import io
import os
import pty
import subprocess
import sys
import time

import pytest
from unit_helpers import PACKAGE

from metaflow_extensions.torchrun.plugins.torchrun.console import write_output


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_goes_to_the_stream_of_its_name_at_once(stream, capfd):
    write_output(stream, "[rank 0] größe\n")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == (
        ("[rank 0] größe\n", "") if stream == "stdout" else ("", "[rank 0] größe\n")
    )


def test_a_stdout_without_a_file_is_written_to(monkeypatch):
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)
    write_output("stdout", "one\ntwo\n")
    assert notebook.getvalue() == "one\ntwo\n"


def test_a_stdout_that_is_not_unicode_still_shows_every_line(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    write_output("stdout", "[rank 0] größe \ufffd\n")
    assert narrow.buffer.getvalue().startswith(b"[rank 0] gr")


WRITER = f"""
import sys
from {PACKAGE}.console import write_output
mark, lines, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for i in range(lines):
    write_output("stdout", mark * length + "\\n")
"""


def start_writer(mark, lines, length, **options):
    return subprocess.Popen([sys.executable, "-c", WRITER, mark, str(lines), str(length)], **options)


def test_long_lines_of_two_nodes_on_one_pipe_do_not_mix():
    reading, writing = os.pipe()
    writers = [start_writer(mark, 100, 10_000, stdout=writing) for mark in "ab"]
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        lines = pipe.read().splitlines()
    assert [writer.wait() for writer in writers] == [0, 0]
    assert sorted(lines) == ["a" * 10_000] * 100 + ["b" * 10_000] * 100


def test_a_reader_that_does_not_read_is_not_waited_for_again_and_again():
    reading, writing = os.pipe()
    writer = start_writer("a", 1, 3, stdout=writing)
    assert writer.wait(20) == 0
    begun = time.monotonic()
    script = f"from {PACKAGE}.console import write_output; write_output('stdout', 'b\\n' * 200)"
    subprocess.run([sys.executable, "-c", script], stdout=writing, check=True, timeout=20)
    assert time.monotonic() - begun < 5.0  # 200 lines at 0.05 s each would be 10 s
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        assert pipe.read() == "aaa\n" + "b\n" * 200


# --- readers that do not read, and streams that nobody can read ------------------------------------


def run_script(script, **options):
    """Start a script that has `write_output`."""
    begin = f"import os, signal, sys, threading, time\nfrom {PACKAGE}.console import write_output\n"
    return subprocess.Popen([sys.executable, "-c", begin + script], **options)


MANY = "".join(f"line {number}\n" for number in range(20_000))
WRITE_MANY = """
os.set_blocking(1, False)  # as Node.js leaves it, for all that have it
for number in range(0, 20_000, 2_000):
    write_output("stdout", "".join(f"line {n}\\n" for n in range(number, number + 2_000)))
"""


@pytest.mark.parametrize("kind", [os.pipe, pty.openpty])
def test_a_stream_that_does_not_block_loses_nothing(kind):
    reading, writing = kind()
    script = run_script(WRITE_MANY, stdout=writing)
    os.close(writing)
    read = b""
    with open(reading, "rb", buffering=0) as file:
        while chunk := _read(file, 1000):  # slowly: the pipe is always full
            read += chunk
    assert script.wait(20) == 0
    assert read.decode().replace("\r\n", "\n") == MANY


def _read(file, size):
    try:
        return file.read(size)
    except OSError:  # so a terminal's other side has gone
        return b""


# Tells on a file of its own what the calls return, and how long they take.
PATIENT = """
def tell(text, patience_s):
    begun = time.monotonic()
    said = write_output("stderr", text, patience_s)
    print(said, time.monotonic() - begun, file=sys.stdout, flush=True)
"""


def told(script):
    said, seconds = script.stdout.readline().split()
    return said == b"True", float(seconds)


def test_nobody_waits_for_a_reader_that_does_not_read_and_it_can_have_all_later():
    reading, writing = os.pipe()
    body = """
tell(("x" * 79 + "\\n") * 1000, 0.3)  # more than a pipe holds
waits = threading.Thread(target=write_output, args=("stderr", "waits\\n", 60), daemon=True)
waits.start()
tell("event 1\\n", 0.3)
tell("event 2\\n", 0.3)
sys.stdin.readline()
waits.join()
tell("late\\n", 30)
"""
    script = run_script(PATIENT + body, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing)
    os.close(writing)
    for _ in range(3):
        taken, seconds = told(script)
        assert not taken
        assert 0.3 <= seconds < 3.0
    script.stdin.write(b"\n")
    script.stdin.flush()
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    assert told(script)[0]
    assert text == ("x" * 79 + "\n") * 1000 + "waits\nevent 1\nevent 2\nlate\n"
    script.communicate()


def test_what_waits_for_a_reader_is_written_once_at_the_end_and_not_by_a_child():
    reading, writing = os.pipe()
    body = """
tell(("x" * 79 + "\\n") * 1000, 0.0)
child = os.fork()
if child:
    tell("last\\n", 0.0)  # now it is read, while the child ends
    os.waitpid(child, 0)
"""
    script = run_script(PATIENT + body, stdout=subprocess.PIPE, stderr=writing)
    os.close(writing)
    assert [told(script)[0], told(script)[0]] == [False, False]
    with open(reading, encoding="utf-8") as pipe:
        assert pipe.read() == ("x" * 79 + "\n") * 1000 + "last\n"
    script.communicate()


@pytest.mark.parametrize(
    ("closing", "reason"),
    [
        ("os.close(1)", "Bad file descriptor"),
        ("sys.stdout.close()", "closed file"),
        ("sys.stdout = None", "there is no stdout"),
        ("sys.stdout.detach()", "detached"),
        ("r, w = os.pipe(); os.dup2(w, 1); os.close(r)", "Broken pipe"),
        ("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", "No space left"),
    ],
)
def test_a_stream_that_can_not_be_written_to_is_said_once_and_stops_nobody(closing, reason):
    body = f"{closing}\nfor _ in range(3): assert write_output('stdout', 'unseen\\n')\nos._exit(0)"
    done = run_script(body, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, told_of_it = done.communicate(timeout=20)
    assert done.returncode == 0
    assert told_of_it.count("\n") == 1, told_of_it
    line = told_of_it
    assert line.startswith("[torchrun] stdout can't be written to (")
    assert reason in line


def test_a_stream_of_the_steps_own_gets_the_text_even_if_it_has_a_file(tmp_path, monkeypatch):
    """As a notebook's, or one that writes to a file as well."""
    got = []
    with open(tmp_path / "below", "w") as below:

        class Tee:
            fileno = below.fileno

            def write(self, text):
                got.append(text)

            def flush(self):
                pass

        monkeypatch.setattr(sys, "stdout", Tee())
        assert write_output("stdout", "größe\n")
    assert "".join(got) == "größe\n"


def test_a_writer_that_was_halted_with_the_lock_is_waited_for_once():
    reading, writing = os.pipe()
    holder = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    begun = time.monotonic()
    writer = start_writer("a", 20, 3, stdout=writing)
    os.close(writing)
    assert writer.wait(20) == 0
    os.close(holder)
    with open(reading, encoding="utf-8") as pipe:
        assert pipe.read() == "aaa\n" * 20
    assert time.monotonic() - begun < 10.0  # a second for each line would be 20 s
