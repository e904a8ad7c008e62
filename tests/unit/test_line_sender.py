"""A member's lines are sent now and then, at a bounded rate, and only where they hold up nothing."""

from types import SimpleNamespace

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.channel.backlog import Limits
from metaflow_extensions.torchrun.plugins.torchrun.channel.line_sender import LineSender

LIMITS = Limits.for_gang(8)
LINE = "x" * 99 + "\n"


class FakeChannel:
    """A channel whose loop does what is due when the test lets time go by."""

    def __init__(self):
        self.now, self.sent, self.has_room = 0.0, [], True
        self._due = []
        loop = SimpleNamespace(call_later=self._call_later, time=lambda: self.now)
        self.sender = LineSender(loop, 8, self.sent.append, lambda: self.has_room)

    def _call_later(self, seconds, call):
        self._due.append((self.now + seconds, call))

    def pass_time(self, seconds):
        until = self.now + seconds
        while due := [each for each in self._due if each[0] <= until]:
            first = min(due, key=lambda each: each[0])
            self._due.remove(first)
            self.now = first[0]
            first[1]()
        self.now = until

    @property
    def waits(self):
        return bool(self._due)

    @property
    def chars(self):
        return sum(len(lines.stdout) for lines in self.sent)


@pytest.fixture
def channel():
    return FakeChannel()


def test_some_lines_are_one_message_and_then_nothing_is_left_to_do(channel):
    for _ in range(50):
        channel.sender.add("stdout", LINE)
    assert channel.sent == []
    channel.pass_time(LIMITS.pause_s)
    assert [lines.stdout for lines in channel.sent] == [LINE * 50]
    channel.pass_time(LIMITS.pause_s)
    assert not channel.waits
    channel.sender.add("stdout", "")
    assert not channel.waits
    channel.sender.add("stderr", "again\n")
    channel.pass_time(LIMITS.pause_s)
    assert channel.sent[-1].stderr == "again\n"


def test_a_line_after_a_silence_goes_at_once_and_the_next_ones_wait(channel):
    channel.sender.add("stdout", "first\n")
    channel.pass_time(0.1)
    assert channel.chars == len("first\n")
    channel.sender.add("stdout", "second\n")
    channel.pass_time(LIMITS.pause_s - 0.2)
    assert channel.chars == len("first\n")
    channel.pass_time(0.2)
    assert channel.chars == len("first\nsecond\n")
    channel.pass_time(LIMITS.pause_s)
    channel.sender.add("stdout", "third\n")
    channel.pass_time(0.1)
    assert channel.chars == len("first\nsecond\nthird\n")


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
    channel.pass_time(1.0)
    assert not channel.waits


def test_nothing_is_sent_while_the_network_has_not_taken_what_was_sent_before(channel):
    channel.has_room = False
    for _ in range(100):
        channel.sender.add("stdout", LINE * 100)
        channel.pass_time(0.5)
    assert channel.sent == []
    channel.has_room = True
    channel.pass_time(LIMITS.pause_s)
    assert channel.sent[0].left_out + channel.chars // len(LINE) == 100 * 100
