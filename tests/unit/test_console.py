"""Output reaches stdout and stderr whole, at once, whatever they are, and waits for its reader as long as it takes."""

import contextlib
import io
import os
import subprocess
import sys

import pytest
from unit_helpers import OURS

from metaflow_extensions.torchrun.plugins.torchrun.events import DEBUG, Event
from metaflow_extensions.torchrun.plugins.torchrun.task import console

# A process that writes as a supervisor does, whatever texts `words` makes of its arguments, and then waits.
WRITER = f"""{OURS}
import asyncio
from ours.supervisor.output import Output
async def main():
    output = Output(print)
    for text in eval(sys.argv[1]):
        output.write("stdout", text.encode())
    await output.settle()
asyncio.run(main())
sys.stdin.read()
"""


@pytest.fixture
def start():
    """Return a function that starts a writer of some texts, Python that is evaluated there."""
    with contextlib.ExitStack() as started:

        def start(texts, stdout, stderr=None, **options):
            command = [sys.executable, "-c", WRITER, texts]
            writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, **options)
            started.callback(writer.communicate)
            started.callback(writer.kill)
            return writer

        yield start


@pytest.fixture
def pipe():
    """Return both ends of a pipe."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            os.close(fd)


# --- what a supervisor writes ---------------------------------------------------------------------


def test_long_lines_of_several_nodes_do_not_mix(start, pipe):
    for mark in "abc":
        start(f"['{mark}' * 20_000 + '\\n'] * 300", pipe[1])
    read = bytearray()
    while read.count(b"\n") < 900:
        read += os.read(pipe[0], 1_000_000)
    assert sorted(read.decode().split()) == [mark * 20_000 for mark in "abc" for _ in range(300)]


def test_a_stream_without_a_reader_is_said_once_and_stops_nobody(start, pipe):
    os.close(pipe[0])
    writer = start("['unseen\\n'] * 3", pipe[1], subprocess.PIPE)
    (line,) = writer.communicate()[1].decode().splitlines()
    assert line.startswith("[torchrun] stdout can't be written to (")
    assert "Broken pipe" in line


# --- what a task writes itself --------------------------------------------------------------------


def test_a_stdout_that_is_not_unicode_still_shows_every_line(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    console.write("stdout", "[rank 0] größe \ufffd\n")
    assert narrow.buffer.getvalue() == b"[rank 0] gr\\xf6\\xdfe \\ufffd\n"


@pytest.mark.parametrize(("debug", "shown"), [("", ""), ("0", ""), ("1", "[torchrun node 1] runs: torchrun\n")])
def test_details_are_written_where_they_are_wanted(debug, shown, monkeypatch, capfd):
    monkeypatch.setenv(DEBUG, debug)
    console.to_log(Event("command", 1, "runs: torchrun", is_detail=True), 2)
    console.to_log(Event("note", 0, "news of a single node"), 1)
    assert capfd.readouterr().err == f"{shown}[torchrun] news of a single node\n"
