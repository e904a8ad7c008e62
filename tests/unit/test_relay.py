"""Lines of other nodes: they wait bounded, are sent at a bounded rate, and are written in order; nobody is held up."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import InLoop, Loop
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.channel import relay as module
from metaflow_extensions.torchrun.plugins.torchrun.channel.backlog import Backlog, Limits, LineSender
from metaflow_extensions.torchrun.plugins.torchrun.channel.frames import MAX_FRAME_BYTES, encode
from metaflow_extensions.torchrun.plugins.torchrun.channel.relay import Relay
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Lines

# --- where they wait ------------------------------------------------------------------------------

TEXTS = st.lists(
    st.tuples(st.sampled_from(["stdout", "stderr"]), st.integers(1, 2000), st.integers(0, 30)), max_size=30
)


def taken(backlog):
    return list(iter(backlog.pop, None))


@given(TEXTS)
def test_every_line_is_there_in_order_or_is_counted_where_it_is_missing(texts):
    backlog, number = Backlog(20_000), 0
    for stream, count, width in texts:
        backlog.add(stream, "".join(f"{number + each} {'x' * width}\n" for each in range(count)))
        number += count
    expected = 0
    for lines in taken(backlog):
        expected += lines.left_out
        numbers = [[int(line.split()[0]) for line in text.splitlines()] for text in (lines.stdout, lines.stderr)]
        assert numbers == [sorted(each) for each in numbers]
        begin, expected = expected, expected + sum(map(len, numbers))
        assert sorted(numbers[0] + numbers[1]) == list(range(begin, expected))
    assert expected == number


def test_no_stdout_comes_within_a_block_on_stderr_that_takes_two_messages():
    """Of a message, stdout is written first."""
    backlog, block = Backlog(10**6), [f"  File {number} {'x' * 80}" for number in range(500)]
    backlog.add("stdout", "before\n")
    backlog.add("stderr", "\n".join(block) + "\n")
    backlog.add("stdout", "after\n")
    written = "".join(lines.stdout + lines.stderr for lines in taken(backlog))
    assert written.splitlines() == ["before", *block, "after"]


def test_of_a_long_line_the_begin_is_kept():
    backlog = Backlog(10**6)
    backlog.add("stdout", "short\n" + "x" * 300_000 + "\nafter\n")
    text = "".join(lines.stdout for lines in taken(backlog))
    assert text == f"short\n{'x' * 8192}… [{300_001 - 8192} characters are left out here]\nafter\n"


def test_a_message_is_far_below_the_limit_of_a_frame_whatever_stands_in_it():
    backlog = Backlog(10**7)
    for character in ("\x00", "🙂", "\ud83d", "x"):
        backlog.add("stdout", (character * 60 + "\n") * 5000)
    sizes = [len(encode(lines)) for lines in taken(backlog)]
    assert max(sizes) < MAX_FRAME_BYTES / 4
    assert len(sizes) < 60


def test_the_limits_hold_for_gangs_of_any_size():
    for nodes in (2, 8, 64, 256, 4000):
        limits = Limits.for_gang(nodes)
        assert nodes / limits.pause_s <= 400  # messages a second at the control node
        assert nodes * limits.chars_per_s <= 4 * 1024**2
        assert nodes * limits.waiting_chars <= 128 * 1024**2
        assert limits.chars_per_s * limits.pause_s < limits.waiting_chars  # else lines that may go are left out
    assert Limits.for_gang(2).pause_s == 0.5
    assert 8 / Limits.for_gang(8).pause_s <= 4  # a small gang's messages wake its control node seldom


# --- how they are sent ----------------------------------------------------------------------------

LIMITS = Limits.for_gang(8)
LINE = "x" * 99 + "\n"


class FakeChannel:
    """A channel whose loop does what is due when the test lets time go by."""

    def __init__(self):
        self.now, self.sent, self.has_room, self.due = 0.0, [], True, []
        loop = SimpleNamespace(
            time=lambda: self.now, call_later=lambda seconds, call: self.due.append((self.now + seconds, call))
        )
        self.sender = LineSender(loop, 8, self.sent.append, lambda: self.has_room)

    def pass_time(self, seconds):
        until = self.now + seconds
        while self.due and self.due[0][0] <= until:
            self.now, call = self.due.pop(0)
            call()
        self.now = until

    @property
    def chars(self):
        return sum(len(lines.stdout) for lines in self.sent)


@pytest.fixture
def channel():
    return FakeChannel()


def test_a_line_after_a_silence_goes_at_once_and_the_next_ones_together(channel):
    for text in ("first\n", "third\n"):
        channel.sender.add("stdout", text)
        channel.pass_time(0.1)
        assert channel.sent[-1] == Lines(text)
        for _ in range(50):
            channel.sender.add("stdout", LINE)
        channel.pass_time(LIMITS.pause_s - 0.2)
        assert channel.sent[-1] == Lines(text)
        channel.pass_time(0.2)
        assert channel.sent[-1] == Lines(LINE * 50)
        channel.pass_time(LIMITS.pause_s)
        assert not channel.due
    channel.sender.add("stdout", "")
    assert not channel.due


def test_a_flood_is_sent_at_a_bounded_rate(channel):
    for _ in range(600):  # a minute
        channel.sender.add("stdout", LINE * 10_000)
        channel.pass_time(0.1)
    bound = LIMITS.waiting_chars + 60 * LIMITS.chars_per_s
    assert 0.8 * bound < channel.chars < 1.1 * bound
    channel.sender.send_rest()
    assert channel.chars < 1.1 * bound + LIMITS.waiting_chars
    missing = sum(lines.left_out for lines in channel.sent)
    assert missing + channel.chars // len(LINE) == 600 * 10_000


def test_nothing_is_sent_while_the_network_has_not_taken_what_was_sent_before(channel):
    channel.has_room = False
    for _ in range(100):
        channel.sender.add("stdout", LINE * 100)
        channel.pass_time(0.5)
    channel.pass_time(10 * LIMITS.pause_s)  # and nothing more comes
    assert channel.sent == []
    channel.has_room = True
    channel.pass_time(LIMITS.pause_s)
    assert channel.sent[0].left_out + channel.chars // len(LINE) == 100 * 100


# --- how they are written -------------------------------------------------------------------------


class Screen:
    """What the relay writes; while it is paused it takes one text over and says that nobody reads it."""

    def __init__(self):
        self.texts, self._is_paused, self._calls = {"stdout": [], "stderr": []}, False, []

    def write_output(self, stream, lines):
        self.texts[stream].append(lines.decode())

    def when_written(self, call):
        self._calls.append(call)
        self._call()

    def pause(self):
        self._is_paused = True

    def go_on(self):
        self._is_paused = False
        self._call()

    def _call(self):
        while self._calls and not self._is_paused:
            self._calls.pop()()

    def lines(self, stream="stdout"):
        return "".join(self.texts[stream]).splitlines()


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.stop()


@pytest.fixture
def relay(loop, screen):
    relay = InLoop(loop, Relay)
    relay.start(screen)
    yield relay
    screen.go_on()
    relay.close()


def test_a_reader_that_pauses_holds_up_nobody_and_hears_what_is_missing(relay, screen):
    screen.pause()
    relay.add(1, Lines("first\n"))
    eventually(lambda: screen.lines() == ["first"])
    begun = time.monotonic()
    for number in range(300):
        relay.add(1, Lines("".join(f"{number} {line:05d} {'x' * 90}\n" for line in range(300))))
    relay.settle(0.1)
    assert time.monotonic() - begun < 2.0  # 9 MB
    assert screen.lines() == ["first"]
    screen.go_on()
    relay.settle()
    relay.add(1, Lines("after\n"))
    relay.add(2, Lines("other\n"))
    relay.settle()
    first, *lines, gap, after, other = screen.lines()
    assert (first, after, other) == ("first", "after", "other")
    assert int(gap.split("] ")[1].split()[0]) + len(lines) == 300 * 300
    assert lines[-1].split()[1] == "00299"


def test_what_found_no_place_until_the_end_is_told_at_the_end(relay, screen, monkeypatch):
    monkeypatch.setattr(module, "_WAITING", 1)
    screen.pause()
    relay.add(1, Lines("first\n"))
    eventually(lambda: screen.lines() == ["first"])
    for _ in range(3):
        relay.add(1, Lines("more\n", "and more\n"))
    begun = time.monotonic()
    relay.close()
    assert time.monotonic() - begun < 1.0  # it comes even if nobody reads
    assert [line[:40] for line in screen.lines()] == ["first", "more", "[torchrun node 1] 4 lines are left out h"]


def test_lines_go_at_once_after_a_silence_and_then_those_of_a_moment_together(relay, screen, monkeypatch):
    monkeypatch.setattr(module, "_COLLECT_S", 60.0)
    relay.add(1, Lines("first\n"))
    eventually(lambda: screen.lines() == ["first"])
    for node in (2, 3, 4):
        relay.add(node, Lines(f"of {node}\n"))
    time.sleep(0.1)
    assert screen.lines() == ["first"]
    begun = time.monotonic()
    relay.settle()  # a launch's end waits for no moment
    assert time.monotonic() - begun < 1.0
    assert screen.texts["stdout"] == ["first\n", "of 2\nof 3\nof 4\n"]
    relay.add(1, Lines("".join(f"{number} {'x' * 90}\n" for number in range(3000))))  # some messages' worth
    begun = time.monotonic()
    relay.close()  # all that has come is written before
    assert len(screen.lines()) == 3004
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
