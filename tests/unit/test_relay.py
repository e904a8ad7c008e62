"""Other nodes' lines are written in order and completely, and a reader that pauses holds up nobody."""

import threading
import time

import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.channel import relay as module
from metaflow_extensions.torchrun.plugins.torchrun.channel.relay import Relay
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Lines


class Screen:
    """What the relay writes; while it is paused it takes one text over and says that nobody reads it."""

    def __init__(self):
        self.texts, self.continued, self.asked = {"stdout": [], "stderr": []}, threading.Event(), threading.Event()
        self.continued.set()

    def write(self, stream, text):
        if text:
            self.texts[stream].append(text)
        self.asked.set()
        return self.continued.wait(0.02)

    def lines(self, stream="stdout"):
        return "".join(self.texts[stream]).splitlines()


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def relay(screen):
    relay = Relay(2)
    relay.start(screen.write)
    yield relay
    screen.continued.set()
    relay.close()
    assert not relay._thread.is_alive()


def test_lines_of_two_nodes_are_written_in_the_order_of_each(relay, screen):
    for number in range(100):
        for node in (1, 2):
            relay.add(node, Lines(f"[rank {node}] {number}\n"))
    relay.add(2, Lines(stderr="[rank 2] a warning\n"))
    relay.settle()
    for node in (1, 2):
        label = f"[rank {node}] "
        assert [line for line in screen.lines() if line.startswith(label)] == [f"{label}{n}" for n in range(100)]
    assert screen.lines("stderr") == ["[rank 2] a warning"]


def test_what_is_missing_is_said_where_it_is_missing(relay, screen):
    relay.add(3, Lines("[rank 6] begin\n"))
    relay.settle()
    relay.add(3, Lines("[rank 6] end\n", left_out=1234))
    relay.add(4, Lines("[rank 8] end\n", left_out=1))
    relay.settle()
    why = "they came too fast. Its own log has them, unless its pod was killed or replaced."
    assert screen.lines() == [
        "[rank 6] begin",
        f"[torchrun node 3] 1234 lines are left out here; {why}",
        "[rank 6] end",
        f"[torchrun node 4] 1 line is left out here; {why}",
        "[rank 8] end",
    ]


def test_a_reader_that_pauses_holds_up_nobody_and_has_the_newest_lines_later(relay, screen):
    screen.continued.clear()
    relay.add(1, Lines("first\n"))
    assert screen.asked.wait(10)
    begun = time.monotonic()
    for number in range(200):
        relay.add(1, Lines("".join(f"{number} {line:05d} {'x' * 90}\n" for line in range(300))))
    relay.settle(0.1)
    assert time.monotonic() - begun < 2.0  # 6 MB
    assert screen.lines() == ["first"]
    screen.continued.set()
    relay.settle()
    lines = screen.lines()
    assert lines[0] == "first"
    (gap,) = (line for line in lines if "left out" in line)
    assert int(gap.split("] ")[1].split()[0]) + len(lines) - 2 == 200 * 300
    assert lines[-1].startswith("199 00299 ")
    assert sum(map(len, lines)) < 600_000


def test_of_many_nodes_lines_go_at_once_after_a_silence_and_then_those_of_a_moment_together(screen, monkeypatch):
    monkeypatch.setattr(module, "_COLLECT_S", 60.0)
    relay = Relay(8)
    relay.start(screen.write)
    relay.add(1, Lines("first\n"))
    eventually(lambda: screen.lines() == ["first"])
    eventually(lambda: not relay._is_writing)
    for node in (2, 3, 4):
        relay.add(node, Lines(f"of {node}\n"))
    assert screen.lines() == ["first"]
    relay.settle()  # a launch's end waits for no moment
    assert screen.texts["stdout"] == ["first\n", "of 2\nof 3\nof 4\n"]
    relay.add(1, Lines("".join(f"{number} {'x' * 90}\n" for number in range(3000))))  # some messages' worth
    eventually(lambda: len(screen.lines()) == 3004)
    relay.add(2, Lines("last\n"))
    begun = time.monotonic()
    relay.close()
    assert screen.lines()[-1] == "last"
    assert time.monotonic() - begun < 1.0


TRACE = "Traceback (most recent call last):\n  File '*.py', in größe\n\nValueError: 🙂"


def labelled(text, rank=2):
    return "".join(f"[rank {rank}] {line}\n" for line in text.split("\n"))


def test_it_knows_whether_what_a_rank_wrote_of_its_failure_stands_in_this_log(relay):
    assert not relay.has_written(1, TRACE)
    relay.add(1, Lines(stderr=labelled("a warning\n" + TRACE[:40])))
    relay.add(1, Lines("[rank 2] printed\n", labelled(TRACE[40:] + "\n[W1 teardown]")))
    relay.settle()
    assert not relay.has_written(1, TRACE)  # a line of it has come in two pieces
    relay.add(1, Lines(stderr=labelled(TRACE)))
    relay.settle()
    assert relay.has_written(1, TRACE)
    assert not relay.has_written(1, TRACE.replace("ValueError", "KeyError"))
    assert not relay.has_written(2, TRACE)
    for _ in range(100):
        relay.add(1, Lines(stderr=labelled("x" * 500)))
    relay.settle()
    assert not relay.has_written(1, TRACE)  # it may be long ago, and of another launch
    assert len(relay._ends[1]) == 16 * 1024


def test_what_has_come_is_written_before_the_end(screen):
    relay = Relay(2)
    relay.start(screen.write)
    for node in (1, 2):
        relay.add(node, Lines("".join(f"[rank {node}] {line:05d} {'x' * 80}\n" for line in range(2000))))
    relay.close()
    assert len(screen.lines()) == 4000


def test_the_end_comes_even_if_nobody_reads(screen):
    relay = Relay(2)
    relay.start(screen.write)
    screen.continued.clear()
    relay.add(1, Lines("first\n"))
    assert screen.asked.wait(10)
    begun = time.monotonic()
    relay.close()
    assert time.monotonic() - begun < 1.0
    eventually(lambda: not relay._thread.is_alive())


def test_what_a_member_sends_that_is_no_text_of_ours_does_no_harm(relay, screen):
    relay.add(1, Lines("no number\n", left_out=-3))
    relay.add(1, Lines(left_out=5))
    relay.settle()
    assert screen.lines() == ["no number"]


def test_without_a_writer_nothing_is_kept():
    relay = Relay(2)
    relay.add(1, Lines("nobody asked\n"))
    relay.settle()
    relay.close()
    assert not relay._backlogs
