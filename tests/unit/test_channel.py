"""The gang's connections over real sockets: members are served, others are not, silence is noticed."""

import hashlib
import hmac
import queue
import re
import socket
import struct
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import psutil
import pytest
from test_network import needs_ipv6
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.channel import control_channel, listener, member_channel
from metaflow_extensions.torchrun.plugins.torchrun.channel.connection import new_token
from metaflow_extensions.torchrun.plugins.torchrun.channel.control_channel import ControlChannel
from metaflow_extensions.torchrun.plugins.torchrun.channel.frames import LENGTH, decode, encode
from metaflow_extensions.torchrun.plugins.torchrun.channel.member_channel import MemberChannel
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import ConnectPolicy, LaunchPolicy, Rules
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import (
    Abort,
    Ack,
    Beat,
    Bye,
    Ended,
    Failed,
    Go,
    Join,
    Leave,
    Note,
    Ready,
    Replaced,
    Restart,
    Stop,
    Told,
    Verdict,
    Welcome,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.state import Gang
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import pick_port

HOST = "127.0.0.1"
READY = Ready(0, 1, "abc", {"torch": "2.13.0", "python": "3.11.7"})
MAGIC = b"mf-torchrun/1\0\0\0"
QUICK = ConnectPolicy(attempt_s=0.5)


class ControlLost(NamedTuple):
    """What a member's channel says when it has lost the control node."""

    reason: str


class Inbox:
    """A node's messages, readable with a deadline."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        self.seen = []

    def __call__(self, message):
        self._queue.put(message)

    def expect(self, kind, deadline_s=10.0):
        """Return the next message of a kind; the kinds of others on the way are kept in `seen`."""
        deadline = time.monotonic() + deadline_s
        while True:
            message = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            self.seen.append(type(message))
            if isinstance(message, kind):
                return message


def once(function, **defaults):
    """Return a function that calls `function` the first time only."""
    left = [function]
    return lambda **given: left and left.pop()(**{**defaults, **given})


class Control:
    """The control node's side of a test."""

    def __init__(self, num_nodes, heartbeat_s, started_timeout_s, host):
        self.inbox, self.token = Inbox(), new_token()
        gang = Gang(num_nodes, lambda pinned: pinned or pick_port(), Rules(started_timeout_s, 1.0))
        self.channel = ControlChannel(gang, self.inbox, self.token, heartbeat_s)
        self.port = self.channel.listen(None, host)
        self.channel.send(Join(node=0, host="host-0"))
        self.inbox.expect(Welcome)
        self.close = once(self.channel.close, wait_s=0.0)
        self.send = self.channel.send


@pytest.fixture
def opened():
    """Close everything that a test opens, whatever happens; last opened, first closed."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_control(opened):
    def start(num_nodes=2, heartbeat_s=20.0, started_timeout_s=60.0, host=HOST):
        control = Control(num_nodes, heartbeat_s, started_timeout_s, host)
        opened.callback(control.close)
        return control

    return start


@pytest.fixture
def new_member(opened):
    """Return a function that makes a member's channel, not connected yet."""

    def make(node=1, heartbeat_s=20.0, policy=None):
        inbox = Inbox()
        member = MemberChannel(node, inbox, lambda reason: inbox(ControlLost(reason)), heartbeat_s, policy)
        member.close = once(member.close)
        opened.callback(member.close)
        member.inbox = inbox
        return member

    return make


@pytest.fixture
def join(new_member):
    """Return a function that makes a member of a control node's gang."""

    def make(control, node=1, addresses=(HOST,), **more):
        member = new_member(node, **more)
        member.address = member.connect(addresses, control.port, control.token, 10.0)
        member.inbox.expect(Welcome)
        return member

    return make


# --- a member that tests play by hand -------------------------------------------------------------


def mac(token, role, nonce):
    return hmac.new(token.encode(), role + b"\0" + nonce, hashlib.sha256).digest()


def raw_connection(control):
    return socket.create_connection((HOST, control.port), timeout=10.0)


@contextmanager
def raw_member(control):
    """Do by hand what a member does, up to its join."""
    with raw_connection(control) as sock:
        shake_hands(sock, control.token)
        sock.sendall(encode(Join(node=1, host="host-1")))
        yield sock


def receive(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "closed early"
        data += piece
    return data


def shake_hands(sock, token):
    greeting = receive(sock, len(MAGIC) + 32)
    assert greeting.startswith(MAGIC)
    nonce = b"n" * 32
    sock.sendall(nonce + mac(token, b"member", greeting[len(MAGIC) :]))
    assert receive(sock, 32) == mac(token, b"control", nonce)


def leave_well(member, control):
    """Have a member leave, which nobody has taken for lost."""
    member.send(Leave())
    member.inbox.expect(Ack)
    assert Abort not in control.inbox.seen


def connections_to(port):
    """Return the states of this process's connections to a port."""
    return [c.status for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]


def is_closed(sock, deadline_s=5.0):
    """Tell whether the other side closes the connection in time; what it sends before does not matter."""
    deadline = time.monotonic() + deadline_s
    try:
        while True:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            if not sock.recv(65536):
                return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.fixture
def answering(opened):
    """Return a function that has something else than a control node answer the next connection; it returns the port."""

    def start(answer):
        server = opened.enter_context(socket.create_server((HOST, 0)))

        def serve():
            sock, _ = server.accept()
            server.close()
            with sock:
                sock.settimeout(10.0)
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        opened.callback(thread.join)
        return server.getsockname()[1]

    return start


# --- the good way ---------------------------------------------------------------------------------


def test_a_failure_on_one_node_reaches_all_with_its_text_unharmed(start_control, join):
    control = start_control()
    member = join(control)
    text = 'ValueError: größe\n"quoted" \\ 🙂 \x00'
    for node in (control, member):
        node.send(READY)
    member.inbox.expect(Go)
    member.send(Ended(0, False, 0, (Failure(Cause("exception", 1, "h", 1, 0, 1, text), 0.1),)))
    control.inbox.expect(Stop)
    control.send(Ended(0, False, 0))
    here, there = (node.inbox.expect(Verdict).error for node in (control, member))
    assert (str(here), here.cause) == (str(there), there.cause)
    assert text in str(here)


@pytest.mark.parametrize(
    ("host", "address"),
    [("", HOST), (HOST, HOST), *(pytest.param(host, "::1", marks=needs_ipv6) for host in ("", "::1"))],
)
def test_members_come_by_ipv4_and_by_ipv6(host, address, start_control, join):
    control = start_control(host=host)
    member = join(control, addresses=["127.0.0.1.invalid", address])
    assert member.address == address
    # Each node learns by which of its own addresses the other knows it.
    assert [control.channel.own_address, member.own_address] == [address, address]


def test_addresses_that_never_answer_are_tried_side_by_side(start_control, join, opened):
    """One after the other takes 5 s for each."""
    control = start_control()
    silent = [f"127.0.1.{number}" for number in range(1, 101)]
    for address in silent:  # the kernel connects, and then nobody speaks
        opened.enter_context(socket.create_server((address, control.port)))
    begun = time.monotonic()
    assert join(control, addresses=[*silent, HOST]).address == HOST
    assert time.monotonic() - begun < 6
    eventually(lambda: connections_to(control.port) == ["ESTABLISHED"], "closing those to the silent", deadline_s=2.0)


def test_of_many_addresses_that_work_one_connection_stays(start_control, join):
    control = start_control(host="")
    at_once = ConnectPolicy(next_address_s=0.0)
    member = join(control, addresses=[f"127.0.0.{number}" for number in range(1, 30)], policy=at_once)
    eventually(lambda: connections_to(control.port) == ["ESTABLISHED"], "closing all connections but one")
    leave_well(member, control)  # and it is the one that was taken


def test_closing_waits_for_members_that_have_yet_to_leave(start_control, join):
    control = start_control()
    member = join(control)
    control.send(Leave())
    member.inbox.expect(Bye)
    member.send(Leave())
    begun = time.monotonic()
    control.close(wait_s=30.0)
    assert time.monotonic() - begun < 10.0
    member.inbox.expect(Ack)


# --- unauthenticated connections ------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [b"\0" * 64, b"GET / HTTP/1.1\r\nHost: control\r\n\r\n" + b"x" * 64, b"\xff" * 100_000, MAGIC + b"x" * 64],
    ids=["zeros", "http", "flood", "our magic"],
)
def test_garbage_is_hung_up_on_and_members_are_still_served(words, start_control, join):
    control = start_control()
    with raw_connection(control) as sock:
        sock.sendall(words[:31])  # one that ends half way does no harm either
    with raw_connection(control) as sock:
        sock.sendall(words)
        assert is_closed(sock)
    join(control)


@pytest.mark.parametrize("whose", [b"member", b"control"], ids=["recorded", "mirrored"])
def test_a_proof_is_worth_nothing_on_another_connection_or_in_another_role(whose, start_control):
    control = start_control()
    with raw_connection(control) as first, raw_connection(control) as second:
        greetings = [receive(sock, len(MAGIC) + 32) for sock in (first, second)]
        challenge = greetings[whose == b"control"][len(MAGIC) :]
        second.sendall(b"n" * 32 + mac(control.token, whose, challenge) + encode(Join(node=1, host="evil")))
        assert is_closed(second)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(struct.pack(">I", 0xFFFFFFFF) + b"x" * 1000, id="4 GB"),
        pytest.param(struct.pack(">I", 4) + b"\xff\xfe{}", id="no json"),
        pytest.param(encode(Leave()), id="no join"),
        pytest.param(encode(Join(node=99)), id="node 99"),
        pytest.param(encode(Join(node=-1)), id="node -1"),
        pytest.param(encode(Join(node=0)), id="control"),
    ],
)
def test_one_who_knows_the_token_but_talks_nonsense_is_hung_up_on(words, start_control, join):
    control = start_control()
    with raw_connection(control) as sock:
        shake_hands(sock, control.token)
        sock.sendall(words)
        assert is_closed(sock)
    join(control)


def test_a_member_that_sends_too_long_a_frame_is_lost_and_the_control_node_is_not(start_control):
    control = start_control()
    with raw_member(control) as sock:
        sock.sendall(struct.pack(">I", 0x7FFFFFFF) + b"x" * 1000)
        assert is_closed(sock)
    message = control.inbox.expect(Abort).error.message
    assert "Node 1 (host host-1)" in message
    assert "a frame of 2147483647 bytes" in message


@pytest.mark.parametrize(
    ("greeting", "answered"),
    [(MAGIC + b"x" * 64, 64), (b"220 smtp.example.org ESMTP ready, and much more than forty-eight bytes\r\n", 0)],
    ids=["can't prove itself", "another service"],
)
def test_a_member_does_not_trust_whoever_answers(greeting, answered, answering, new_member):
    heard = queue.SimpleQueue()

    def answer(sock):
        sock.sendall(greeting)
        with sock.makefile("rb") as said:
            heard.put(said.read())

    with pytest.raises(ConnectionError, match="token"):
        new_member().connect([HOST], answering(answer), new_token(), 10.0)
    assert len(heard.get(timeout=10.0)) == answered  # its own proof, but not its join


def test_an_address_where_nobody_speaks_takes_no_longer_than_the_policy_says(opened, new_member):
    silent = opened.enter_context(socket.create_server((HOST, 0)))
    for policy, timeout_s in ((QUICK, 10.0), (None, 0.5)):
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
            new_member(policy=policy).connect([HOST], silent.getsockname()[1], new_token(), timeout_s)
        assert time.monotonic() - begun < 3.0


@pytest.mark.parametrize(
    ("others", "is_refused"),
    [([], True), (["127.0.0.1.invalid"], True), (["SILENT"], False), (["x" * 70], False)],
    ids=["alone", "a name that nobody knows", "a silent one", "no name at all"],
)
def test_a_member_tells_whether_nobody_listens_any_more(others, is_refused, opened, new_member):
    port = pick_port()
    opened.enter_context(socket.create_server(("127.0.0.2", port)))
    addresses = [HOST, *("127.0.0.2" if other == "SILENT" else other for other in others)]
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one is looked at below
        new_member(policy=QUICK).connect(addresses, port, new_token(), 10.0)
    assert isinstance(caught.value, ConnectionRefusedError) is is_refused


def test_who_says_nothing_is_hung_up_on_in_time(start_control, monkeypatch):
    monkeypatch.setattr(listener, "_HANDSHAKE_S", 0.3)
    with raw_connection(start_control()) as sock:
        assert is_closed(sock)


def test_when_all_places_are_taken_less_time_is_given_and_a_member_gets_in(start_control, join, opened, monkeypatch):
    monkeypatch.setattr(listener, "_MAX_UNAUTHENTICATED", 10)
    monkeypatch.setattr(listener, "_HANDSHAKE_WHEN_FULL_S", 0.3)
    control = start_control()
    crowd = [opened.enter_context(raw_connection(control)) for _ in range(50)]
    member = join(control)
    assert is_closed(crowd[0])
    leave_well(member, control)


def test_hundreds_may_connect_at_the_same_moment(start_control, opened):
    control = start_control()
    busy = threading.Event()
    opened.callback(busy.set)
    control.channel._thread.post(busy.wait, 10.0)  # nobody accepts for now; the kernel keeps the queue
    for _ in range(300):
        opened.enter_context(socket.create_connection((HOST, control.port), timeout=0.8))


# --- one process for each node --------------------------------------------------------------------


def test_a_second_task_of_the_same_node_is_refused_and_the_first_stays(start_control, join):
    control = start_control()
    first = join(control)
    with pytest.raises(GangError, match=r"Node 1 .* turned away.*same node index"):
        join(control)
    leave_well(first, control)


def test_a_task_that_comes_to_replace_another_waits_for_the_gangs_end(start_control, join, new_member, monkeypatch):
    """Kubernetes starts it while the first one's pod still has its grace; its end would have all pods killed."""
    control = start_control(heartbeat_s=0.4)
    first = join(control, heartbeat_s=0.4)
    monkeypatch.setattr(member_channel, "place", lambda: "another pod")
    second = new_member(heartbeat_s=0.4)
    with pytest.raises(TorchrunPreempted, match=r"Node 1 .* turned away.*to replace"):
        second.connect((HOST,), control.port, control.token, 10.0)
    assert "it is being replaced" in first.inbox.expect(Replaced).why
    assert "node 1 (host" in control.inbox.expect(Note).text
    second.send(Leave())  # its words don't count
    heard_at = second._connection._heard_at
    eventually(lambda: second._connection._heard_at > heard_at + 0.5, "living longer than either may be silent")
    assert control.channel.gang.nodes.members == [1]
    assert second.hold_s == 1.0 + 15.0
    control.close()
    second.inbox.expect(ControlLost)


def test_a_member_whose_first_connection_was_lost_unseen_gets_in_by_another(start_control, join, new_member):
    control = start_control()
    first, again = join(control), new_member()
    again._join = first._join  # the same process
    again.connect((HOST,), control.port, control.token, 10.0)
    again.inbox.expect(Welcome)
    first.inbox.expect(ControlLost)
    assert control.channel.gang.nodes.members == [1]


def test_a_member_that_is_cut_off_before_its_welcome_can_connect_again(start_control, new_member, monkeypatch):
    control, member = start_control(), new_member()
    with monkeypatch.context() as patch:
        patch.setattr(control.channel, "_accept_member", lambda connection, join: connection.abort("cut"))
        with pytest.raises(ConnectionError, match="ended before the control node answered"):
            member.connect([HOST], control.port, control.token, 10.0)
    member.connect([HOST], control.port, control.token, 10.0)
    member.inbox.expect(Welcome)
    assert ControlLost not in member.inbox.seen


# --- silence and death ----------------------------------------------------------------------------


def test_a_member_lives_as_long_as_it_answers_heartbeats(start_control):
    control = start_control(heartbeat_s=0.5)
    with raw_member(control) as sock:
        beats, until = 0, time.monotonic() + 1.5
        while time.monotonic() < until:
            message = decode(receive(sock, *LENGTH.unpack(receive(sock, LENGTH.size))))
            if isinstance(message, Beat):
                beats += 1
                sock.sendall(encode(Beat()))
        assert 10 <= beats <= 16
        assert control.channel.gang.nodes.members == [1]
        message = control.inbox.expect(Abort, 5.0).error.message
        assert "for 0.5 s (heartbeat_timeout_s)" in message
        assert is_closed(sock)


def test_no_message_stays_in_memory(start_control, join, monkeypatch):
    control, kept = start_control(heartbeat_s=600.0), []  # no heartbeat comes after it
    handle = control.channel.gang.handle
    monkeypatch.setattr(
        control.channel.gang, "handle", lambda node, message: kept.append(weakref.ref(message)) or handle(node, message)
    )
    join(control, heartbeat_s=600.0).send(Failed(7))
    eventually(lambda: len(kept) == 2)
    eventually(lambda: kept[1]() is None, "the end of the message")


@pytest.mark.parametrize("welcome", [True, False], ids=["after its welcome", "before"])
def test_a_control_node_that_falls_silent_is_lost(welcome, answering, new_member):
    token, member, done = new_token(), new_member(heartbeat_s=0.3), threading.Event()

    def answer(sock):
        nonce = b"c" * 32
        sock.sendall(MAGIC + nonce)
        said = receive(sock, 64)
        assert said[32:] == mac(token, b"member", nonce)
        sock.sendall(mac(token, b"control", said[:32]))
        if welcome:
            sock.sendall(encode(Welcome()))
        done.wait(10.0)

    port = answering(answer)
    try:
        if welcome:
            member.connect([HOST], port, token, 5.0)
            assert "nothing arrived from it for 0.3 s" in member.inbox.expect(ControlLost, 5.0).reason
        else:
            with pytest.raises(TimeoutError, match=r"0\.3 s \(heartbeat_timeout_s\)"):
                member.connect([HOST], port, token, 5.0)
    finally:
        done.set()


def test_a_task_known_to_be_dead_is_reported_without_waiting_for_its_silence(start_control):
    control = start_control(3)
    control.channel.report_gone(2, "its task was killed by SIGKILL")
    assert "its task was killed by SIGKILL" in control.inbox.expect(Abort, 3.0).error.message


def test_time_passes_without_any_message(start_control):
    control = start_control(started_timeout_s=0.2)
    assert "node 1 of 2 did not arrive" in control.inbox.expect(Abort, 5.0).error.message


def test_a_restart_comes_to_the_moment(start_control, join, monkeypatch):
    monkeypatch.setattr(control_channel, "_TICK_S", 60.0)
    control = start_control(heartbeat_s=1000.0)
    member = join(control, heartbeat_s=1000.0)
    policy = LaunchPolicy(max_restarts=1)
    for node in (control, member):
        node.send(replace(READY, policy=policy))
    member.inbox.expect(Go)
    member.send(Ended(0, False, 0, (Failure(Cause("exit", 1, "h", 1, 0, 3), 0.0),)))
    control.send(Ended(0, False, 0))
    member.inbox.expect(Restart)
    begun = time.monotonic()
    assert member.inbox.expect(Go, 3.0).generation == 1
    assert time.monotonic() - begun > 0.5


# --- mistakes of ours -----------------------------------------------------------------------------


def test_what_is_raised_in_the_control_nodes_loop_breaks_the_gang_with_its_text(start_control, join, monkeypatch):
    control = start_control()
    member = join(control)

    def broken(node, message):
        raise KeyError("launch")

    monkeypatch.setattr(control.channel.gang, "handle", broken)
    member.send(READY)
    for inbox in (control.inbox, member.inbox):
        text = inbox.expect(Abort, 5.0).error.message
        assert "channel failed on the control node" in text
        assert "KeyError: 'launch'" in text


def test_a_message_that_can_not_be_sent_is_told_to_all(start_control, join):
    control = start_control()
    member = join(control)
    member.send(Told(0, 0, "some", dict.fromkeys(map(str, range(20000)), "k" * 100)))
    assert "a 'told' message of" in member.inbox.expect(ControlLost, 5.0).reason
    assert "Node 1" in control.inbox.expect(Abort, 5.0).error.message


def test_even_when_nothing_can_be_sent_any_more_all_hear_of_it(start_control, join, monkeypatch):
    control = start_control()
    member = join(control)

    def full(message):
        raise MemoryError("no memory")

    monkeypatch.setattr(control_channel, "encode", full)
    control.send(Leave())  # which says *bye* to the member
    assert "MemoryError: no memory" in control.inbox.expect(Abort, 5.0).error.message
    member.inbox.expect(ControlLost, 5.0)


def test_a_closed_channel_leaves_no_thread_and_swallows_late_words(start_control, join):
    control = start_control()
    member = join(control)
    member.close()
    control.close()
    member.send(READY)
    control.send(READY)
    control.channel.report_gone(1, "late")
    eventually(lambda: not [t for t in threading.enumerate() if t.name in ("torchrun-control", "torchrun-member")])


# --- lines of the workers -------------------------------------------------------------------------


class Log:
    """Takes what the control node writes of other nodes' lines."""

    def __init__(self, control):
        self.text = ""
        control.channel.relay.start(self._write)

    def _write(self, stream, text):
        self.text += text
        return True

    @property
    def lines(self):
        return [line for line in self.text.splitlines() if "left out" not in line]

    @property
    def missing(self):
        return sum(
            map(int, re.findall(r"^\[torchrun node \d+\] (\d+) lines? (?:is|are) left out", self.text, re.MULTILINE))
        )


@pytest.fixture
def launched(start_control, join):
    """Return a control node and a member whose launch runs, and the log of the control node."""
    control = start_control()
    log, member = Log(control), join(control)
    for node in (control, member):
        node.send(READY)
    member.inbox.expect(Go)
    return control, member, log


def test_the_last_lines_come_before_the_end_is_told(launched):
    control, member, log = launched
    member.send_lines("stdout", "last words: größe 🙂\n")
    for node in (member, control):
        node.send(Ended(0, True, 0))
    control.inbox.expect(Verdict)
    control.channel.relay.settle()
    assert log.lines == ["last words: größe 🙂"]


def test_a_flood_of_lines_holds_up_no_message_and_is_counted_to_its_end(launched):
    """20 MB at once, and a failure in between."""
    control, member, log = launched
    for burst in range(20):
        begun = time.monotonic()
        member.send_lines("stdout", "".join(f"{burst * 10_000 + each:07d} {'x' * 90}\n" for each in range(10_000)))
        assert time.monotonic() - begun < 0.5
    begun = time.monotonic()
    member.send(Failed(0, 0, (Failure(Cause("exit", 1, "h", 1, 0, 3), 0.0),)))
    control.inbox.expect(Stop)
    assert time.monotonic() - begun < 0.5
    for node in (member, control):
        node.send(Ended(0, False, 0))
    control.inbox.expect(Verdict)
    control.channel.relay.settle()
    assert len(log.lines) + log.missing == 200_000
    assert log.lines[-1].startswith("0199999 ")
    assert len(log.text) < 8 * 1024**2
