"""The link between a task and its supervisor: packets, and the task's end over a real socket."""

import errno
import signal
import socket
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as some
from limits import limit_s
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.channel import link
from metaflow_extensions.torchrun.plugins.torchrun.channel.codec import (
    PACKET_BYTES,
    Frames,
    first_frame,
    frame,
    packets,
)
from metaflow_extensions.torchrun.plugins.torchrun.channel.link import LinkEnd

ITEMS = some.recursive(
    some.none() | some.booleans() | some.integers() | some.text(some.characters(exclude_categories=())),
    lambda each: some.lists(each) | some.dictionaries(some.text(), each),
)
DATA = some.lists(ITEMS) | some.dictionaries(some.text(), ITEMS)


@given(some.lists(DATA, max_size=5), some.lists(some.integers(1, 20), min_size=1))
def test_frames_arrive_whole_however_they_are_cut(frames, sizes):
    sent, framer, arrived, at, turn = b"".join(map(frame, frames)), Frames(), [], 0, 0
    while at < len(sent):
        size = sizes[turn % len(sizes)]
        arrived += framer.feed(sent[at : at + size])
        at, turn = at + size, turn + 1
    assert arrived == frames


def taken(come):
    """Return all frames of packets that have come."""
    found = []
    while (first := first_frame(come)) is not None:
        found.append(first[0])
        come = come[first[1] :]
    return found


@given(some.lists(DATA, max_size=5), some.integers(0, 5), some.integers(0, 3))
def test_a_frame_whose_end_or_begin_is_missing_spoils_no_other(frames, at, kept):
    long = packets(["x" * 300_000])
    assert len(long) > 3
    before, after = frames[:at], frames[at:]
    for part in (long[:kept], long[len(long) - kept :]):
        come = [each for value in before for each in packets(value)] + part
        come += [each for value in after for each in packets(value)]
        assert taken(come) == frames


@pytest.fixture
def ends():
    """Return two ends, and what each has heard."""
    heard = [], []
    made = [
        LinkEnd(each, inbox.append, lambda: None)
        for each, inbox in zip(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), heard, strict=True)
    ]
    yield made, heard
    for end in made:
        end.close()


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def hears(end, heard, count):
    """Wait until an end has heard so much."""
    deadline = time.monotonic() + limit_s(HANG_S)
    while len(heard) < count and end.end is None:
        assert time.monotonic() < deadline, "hangs"
        end.wait(1.0)


def test_each_end_hears_all_in_order_also_more_than_a_socket_holds(ends):
    (one, other), (at_one, at_other) = ends
    text = "🙂" * 10**5

    def send():
        for number in range(100):
            one.send(number, text)

    sending = in_thread(send)
    hears(other, at_other, 100)
    sending.join(limit_s(HANG_S))
    assert at_other == [[number, text] for number in range(100)]
    for number in range(100):
        other.send("back", number)
    hears(one, at_one, 100)
    assert at_one == [["back", number] for number in range(100)]


class News(Exception):
    pass


def raise_news(number, current):
    raise News


@pytest.fixture
def alarm():
    """Have an alarm raise in the main thread, wherever that is."""
    before = signal.signal(signal.SIGALRM, raise_news)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_handler_that_raises_out_of_a_send_spoils_no_frame(ends, alarm):
    (one, other), (_, at_other) = ends
    hearing = in_thread(lambda: hears(other, at_other, 10**9))
    text, sent = "text" * 50_000, 0
    for _ in range(300):
        with suppress(News):
            alarm(1e-4)
            while True:
                sent += 1
                one.send(sent, text)
    alarm(0)
    one.send("end")
    deadline = time.monotonic() + limit_s(HANG_S)
    while ["end"] not in at_other and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hearing.is_alive()
    *seen, end = at_other
    assert end == ["end"]
    assert all(found[1] == text for found in seen)
    numbers = [found[0] for found in seen]
    assert numbers == sorted(set(numbers)), "none came twice"
    assert len(numbers) >= sent - 300, "a send may be cut off before it keeps its frame"


def test_a_handler_that_raises_while_frames_are_read_loses_none(ends, alarm):
    (one, other), (_, at_other) = ends
    text, count, tries = "text" * 20_000, 400, 0
    sending = in_thread(lambda: [one.send(number, text) for number in range(count)])
    deadline = time.monotonic() + limit_s(HANG_S)
    while not at_other or at_other[-1][0] < count - 1:
        assert time.monotonic() < deadline, "hangs"
        tries += 1
        with suppress(News):
            alarm(1e-4 * (1 + tries % 30))
            while not at_other or at_other[-1][0] < count - 1:
                other.wait(1.0)
    alarm(0)
    sending.join(limit_s(HANG_S))
    numbers = [found[0] for found in at_other]
    assert sorted(set(numbers)) == list(range(count))
    assert numbers == sorted(numbers), "one may be heard twice, but in its place"


def test_a_handler_that_looks_while_frames_are_handled_is_called_again(ends):
    (one, other), (_, at_other) = ends
    looked, missed = [], []

    def handle(frame):
        looked.append(other.look())
        at_other.append(frame)

    other._handle, other.on_missed = handle, lambda: missed.append(True)
    one.send("x")
    assert other.wait(10.0)
    assert (looked, missed, at_other) == ([False], [True], [["x"]])
    assert other.look()


def test_what_is_said_while_a_frame_is_handled_is_sent_after_it(ends):
    (one, other), (at_one, _) = ends
    other._handle = lambda frame: other.send("answer", *frame)
    one.send("question")
    other.wait(10.0)
    hears(one, at_one, 1)
    assert at_one == [["answer", "question"]]


def test_an_end_that_reads_nothing_is_looked_after_until_it_goes_on():
    own, their = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stuck, heard = [], []
    end = LinkEnd(own, heard.append, lambda: stuck.append(True))
    sending = in_thread(lambda: [end.send("text" * 10**5) for _ in range(50)])
    deadline = time.monotonic() + limit_s(HANG_S)
    while len(stuck) < 2:
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.01)
    assert sending.is_alive()
    other = LinkEnd(their, heard.append, lambda: None)
    hears(other, heard, 50)
    sending.join(limit_s(HANG_S))
    assert not sending.is_alive()
    other.close()
    end.send("into nothing")
    assert not end.takes
    end.close()


def test_who_sends_to_an_end_that_is_gone_does_not_wait():
    own, their = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = LinkEnd(own, print, lambda: their.close())
    for _ in range(50):
        end.send("text" * 10**5)
    assert not end.takes
    end.close()


def test_what_the_other_end_has_said_before_its_end_is_heard_although_nothing_can_be_sent_to_it(ends):
    (one, other), (at_one, _) = ends
    other.send("last words")
    other.close()
    one.send("into nothing")
    assert (one.takes, one.end) == (False, None)
    one.wait(10.0)
    assert (at_one, one.end) == ([["last words"]], "")


def test_an_end_that_has_not_read_all_is_heard_to_its_last_word(ends):
    """The kernel tells such an end first by an error."""
    (one, other), (at_one, _) = ends
    one.send("unread")
    other.send("last words")
    other.close()
    one.wait(10.0)
    assert (at_one, one.end) == ([["last words"]], "")


def test_a_handler_that_raises_at_the_end_of_the_link_leaves_no_frame_unheard(ends):
    (one, other), (at_one, _) = ends
    raising = iter([True, False, True, False])

    def handle(frame):
        if next(raising):
            raise News
        at_one.append(frame)

    one._handle = handle
    for number in range(2):
        other.send(number)
    other.close()
    for _ in range(2):
        with pytest.raises(News):
            one.wait(10.0)
        assert one.end is None
    one.wait(10.0)
    assert (at_one, one.end) == ([[0], [1]], "")


@pytest.mark.parametrize("is_gone", [True, False])
def test_who_sends_to_an_end_that_another_process_has_open_gives_up_if_nobody_reads(is_gone, monkeypatch):
    """At once if the process is known to be gone."""
    monkeypatch.setattr(link, "_STUCK_S", 1e6 if is_gone else 0.3)
    own, their = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with their:
        end = LinkEnd(own, print, lambda: is_gone)
        for _ in range(50):
            end.send("text" * 10**5)
        assert not end.takes
        end.close()


def test_who_waits_while_another_thread_handles_does_not_spin(ends):
    (one, other), _ = ends
    one.send("x")
    rounds, until = 0, time.monotonic() + 0.3
    with other._turn:
        while time.monotonic() < until:
            other.wait(1.0)
            rounds += 1
    assert rounds < 100


@pytest.mark.parametrize("error", [OSError(errno.ENOBUFS, "No buffer space"), OSError(errno.EBADF, "closed")])
def test_a_link_that_fails_ends_with_the_reason_when_all_that_has_come_is_handled(error, ends):
    (one, other), _ = ends
    other.send("last words")
    one._check_file = Mock(side_effect=[error, None, None])
    one.send("lost")
    assert (one.takes, one.end) == (False, None)
    one._handle = Mock(side_effect=[News, None])
    with pytest.raises(News):
        one.wait(10.0)
    assert one.end is None
    one.wait(10.0)
    assert one._handle.call_args.args == (["last words"],)
    assert ("No buffer space" in one.end) == (error.errno == errno.ENOBUFS)
    assert one.end


def test_an_end_that_takes_a_little_now_and_then_is_not_given_up(monkeypatch):
    """It takes a packet at every second look; after three looks at which nothing was taken it would be given up."""
    monkeypatch.setattr(link, "_STUCK_S", 2.5 * link._ROOM_S)
    own, their = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    looks, taken = [], []

    def look():
        looks.append(True)
        if len(looks) % 2 == 0:
            taken.append(their.recv(PACKET_BYTES + 1))
        return False

    with their:
        end = LinkEnd(own, print, look)
        end.send("x" * 12 * PACKET_BYTES)
        assert (end.takes, len(looks) > 12) == (True, True)
        end.close()
