"""How nodes find each other when a control node has ended, or another one is there already. Real sockets."""

import socket
import threading
import time

import pytest
from test_address_book import FlowDatastore, book_of
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun import channel as channel_module
from metaflow_extensions.torchrun.plugins.torchrun import joining
from metaflow_extensions.torchrun.plugins.torchrun.address_book import Address
from metaflow_extensions.torchrun.plugins.torchrun.channel import ControlChannel, new_token
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, GangStartTimeout, TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.gang import Gang, Settings
from metaflow_extensions.torchrun.plugins.torchrun.network import free_port, place
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings

HOST = "127.0.0.1"
ELSEWHERE = (
    "127.0.0.2"  # as good as another machine: only the very loopback address is known to have no proxies before it
)


@pytest.fixture
def book():
    return book_of(FlowDatastore())


@pytest.fixture
def control():
    """Return a function that makes a control node's channel: its address, and what is delivered there."""
    open_ = {}

    def start(host=HOST):
        token, inbox = new_token(), []
        channel = ControlChannel(Gang(Settings(2, 60.0, 1.0), lambda pinned: pinned), inbox.append, token, 20.0)
        open_[channel] = channel
        port = channel.listen(None, host)
        channel.send({"type": "join", "node": 0, "host": "host-0", "place": place()})
        assert eventually(lambda: channel.gang.absent == [1])
        return Address((host,), port, token), inbox, lambda: open_.pop(channel).close(0.0)

    yield start
    for channel in open_:
        channel.close(0.0)


def settings(**attributes):
    return parse_settings({**DEFAULTS, **attributes}, "train")


def join(book, **attributes):
    events = []
    try:
        seat, _ = joining.join_as_member(book, 1, 2, settings(**attributes), events.append)
        seat.leave()
    except Exception as error:
        return error, [event.text for event in events]
    return None, [event.text for event in events]


def test_a_control_node_that_has_ended_without_a_word_is_given_up(book, monkeypatch):
    monkeypatch.setattr(joining, "_REFUSED_HERE_S", 1.0)
    port = free_port(HOST)
    book.publish(Address((HOST,), port, "secret"))
    begun = time.monotonic()
    error, said = join(book)
    assert time.monotonic() - begun < 5.0
    assert isinstance(error, GangError)
    assert f"gave up: node 0 (the control node) refuses connections at {HOST}, port {port}, for 1 s" in str(error)
    assert "its task has ended without a word" in str(error)
    assert said == []


def test_of_one_elsewhere_a_word_is_said_first_and_a_newer_address_is_used(book, control, monkeypatch):
    monkeypatch.setattr(joining, "_TRY_S", 0.5)
    book.publish(Address((ELSEWHERE,), free_port(ELSEWHERE), "secret"))
    comes = threading.Timer(1.5, lambda: book.publish(control()[0]))
    comes.start()
    error, (said, *more) = join(book)
    comes.join()
    assert (error, more) == (None, [])
    assert "its task may have ended; trying for 60 s in all" in said


def test_an_address_that_does_not_answer_is_not_taken_for_dead(book, monkeypatch):
    monkeypatch.setattr(joining, "_REFUSED_HERE_S", 1.0)
    with socket.create_server((HOST, 0)) as silent:  # accepts, and says nothing
        book.publish(Address((HOST,), silent.getsockname()[1], "secret"))
        error, said = join(book, all_nodes_started_timeout=3)
    assert "can't reach the control node" in str(error)
    assert said == []


def test_a_second_control_node_gives_way_to_the_first_while_that_lives(book, control, monkeypatch):
    former, inbox, end = control()
    book.publish(former)
    monkeypatch.setattr(channel_module, "place", lambda: "another pod")
    events, raised = [], []

    def run():
        try:
            joining.join_as_control(book, 2, HOST, settings(grace_s=1), events.append, False)
        except TorchrunPreempted as error:
            raised.append(error)

    newcomer = threading.Thread(target=run)
    newcomer.start()
    assert eventually(lambda: [message for message in inbox if message["type"] == "replaced"])
    assert eventually(lambda: events)
    assert "still runs" in events[0].text
    assert "It waits until the gang has ended, 16 s at most" in events[0].text
    assert newcomer.is_alive()
    assert book.look_up(0.0) == former
    end()
    newcomer.join(10.0)
    assert len(raised) == 1


def test_a_control_node_takes_the_place_of_one_that_is_gone(book, monkeypatch):
    monkeypatch.setattr(joining, "_FORMER_S", 1.0)
    monkeypatch.setattr(joining, "addresses_for_others", lambda main_ip: [HOST])
    book.publish(Address((HOST,), free_port(HOST), "secret"))
    seat, channel = joining.join_as_control(book, 2, HOST, settings(), lambda event: None, False)
    assert book.look_up(0.0).token != "secret"
    assert channel.gang.absent == [1]
    seat.leave()


def test_nobody_published_is_another_matter(book):
    error, _ = join(book, all_nodes_started_timeout=1)
    assert isinstance(error, GangStartTimeout)


def test_a_control_node_that_can_not_listen_tells_those_who_would_wait_for_it(book):
    with socket.create_server((HOST, 0)) as taken:
        pinned = settings(channel_port=taken.getsockname()[1])
        with pytest.raises(GangError, match="channel_port") as here:
            joining.join_as_control(book, 2, HOST, pinned, lambda event: None, here_only=True)
    error, _ = join(book)
    assert str(error) == str(here.value)
