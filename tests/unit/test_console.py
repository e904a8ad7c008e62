"""Output reaches the task's own streams whole, at once, whatever they are."""

import fcntl
import io
import os
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


def test_a_writer_that_was_halted_with_the_lock_does_not_silence_the_others():
    reading, writing = os.pipe()
    holder = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    begun = time.monotonic()
    writer = start_writer("a", 1, 3, stdout=writing)
    os.close(writing)
    assert writer.wait(20) == 0
    os.close(holder)
    with open(reading, encoding="utf-8") as pipe:
        assert pipe.read() == "aaa\n"
    assert time.monotonic() - begun < 10.0


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
