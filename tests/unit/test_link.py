"""The link between a task and its supervisor: frames, and two ends over a real socket."""

import queue
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as some

from metaflow_extensions.torchrun.plugins.torchrun.channel.codec import Frames, frame
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


@pytest.fixture
def ends():
    """Return two ends; each is run in a thread, and what it hears is in its inbox."""
    made = [LinkEnd(each) for each in socket.socketpair()]
    inboxes, over, threads = [queue.SimpleQueue(), queue.SimpleQueue()], threading.Event(), []
    for end, inbox in zip(made, inboxes, strict=True):
        threads.append(threading.Thread(target=end.run, args=(inbox.put, over.is_set), kwargs={"look_s": 60.0}))
        threads[-1].start()
    yield made, inboxes
    over.set()
    for end, thread in zip(made, threads, strict=True):
        end.wake()
        thread.join(10)
        assert not thread.is_alive()
        end.close()


def test_each_end_hears_all_in_order_also_more_than_a_socket_holds(ends):
    (one, other), (at_one, at_other) = ends
    text = "🙂" * 10**5
    for number in range(100):
        one.send(number, text)
        other.send("back", number)
    assert [at_other.get(timeout=60) for _ in range(100)] == [[number, text] for number in range(100)]
    assert [at_one.get(timeout=60) for _ in range(100)] == [["back", number] for number in range(100)]


def test_a_handler_that_raises_out_of_a_send_cuts_no_frame(ends):
    """As the wake signal's does, in the main thread, wherever that is."""
    (one, _), (_, at_other) = ends

    class News(Exception):
        pass

    def raise_news(number, current):
        raise News

    before = signal.signal(signal.SIGALRM, raise_news)
    try:
        for number in range(300):
            with suppress(News):
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                while True:
                    one.send(number, "text" * 10000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    one.send("end")
    seen, found = [], None
    while (found := at_other.get(timeout=60)) != ["end"]:
        assert found[1] == "text" * 10000
        seen.append(found[0])
    assert seen == sorted(seen)


@pytest.mark.parametrize("is_there", [True, False])
def test_an_end_that_reads_nothing_holds_up_nobody(is_there):
    one, other = socket.socketpair()
    end, over = LinkEnd(one), threading.Event()
    thread = threading.Thread(target=end.run, args=(print, over.is_set), daemon=True)
    thread.start()
    begin = time.monotonic()
    for _ in range(50):
        end.send("text" * 10**5)
    assert time.monotonic() - begin < 5
    assert end.waiting > 20
    if is_there:  # as where a fork of the task holds it open
        over.set()
        end.wake()
    else:
        other.close()
    thread.join(10)
    assert not thread.is_alive()
    other.close()
    end.send("into nothing")
    end.close()
