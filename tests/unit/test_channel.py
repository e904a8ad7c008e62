"""The gang's connections over real sockets: members are served, and others are not."""

import hashlib
import hmac
import os
import pickle
import queue
import secrets
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager
from unittest.mock import Mock

import pytest
from limits import limit_s
from loops import InLoop, Loop
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.gang import messages as sent
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.connection import LENGTH, decode, encode
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.control_side import ControlSide
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.member_side import MemberSide

HOST = "127.0.0.1"
MAGIC = b"mf-torchrun/1\0\0\0"
RULES = {"started_timeout_s": 60.0, "grace_s": 1.0}


class Loaded:
    """Ends the process that loads it."""

    def __reduce__(self):
        return os._exit, (9,)


PICKLED = pickle.dumps(Loaded())


class Inbox:
    """What a node's task hears, readable with a deadline."""

    def __init__(self):
        self._queue = queue.SimpleQueue()

    def __call__(self, what, *rest):
        if what in ("deliver", "lost"):  # a text: why the control node is lost
            self._queue.put(str(*rest) if what == "lost" else sent.from_wire(*rest))

    def expect(self, kind):
        """Return the next message of a kind."""
        deadline = time.monotonic() + limit_s(HANG_S)
        while True:
            message = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message

    def error(self):
        """Return the text of the error that ends the gang."""
        return self.expect(sent.Abort).error.message


class Control:
    """The control node's side of a test."""

    def __init__(self):
        self.inbox, self.token = Inbox(), secrets.token_hex()
        self.loop = Loop()
        self.side = InLoop(self.loop, lambda: ControlSide(self.inbox, Mock(), 2, 20.0, self.token, RULES))
        self.loop.on_error, self.gang = self.side.itself.fail, self.side.gang
        self.port = self.side.listen(None, HOST)
        self.side.send(sent.Join(node=0, host="host-0"))
        self.inbox.expect(sent.Answer)

    def close(self):
        self.side.close(0.0)
        self.loop.stop()


class Member(InLoop):
    """A member's side of a test; it is not connected yet."""

    def __init__(self):
        self.inbox = Inbox()
        super().__init__(Loop(), lambda: MemberSide(self.inbox, Mock(), 1, 2, 20.0))
        self.in_loop.on_error = self.itself.fail

    def join(self, control):
        self.connect([HOST], control.port, control.token, 10.0)
        self.inbox.expect(sent.Answer)
        return self

    def leave_well(self, control):
        """Leave, when nobody has taken it for lost."""
        self.send(sent.Leave("left"))
        assert self.inbox.expect(sent.Farewell).what == "received"
        assert control.gang.broken is None

    def close(self):
        self.in_loop.call(self.itself.close)
        self.in_loop.stop()


class Opened(ExitStack):
    """Closes all that a test opens, whatever happens; last opened, first closed."""

    def control(self):
        control = Control()
        self.callback(control.close)
        return control

    def member(self):
        member = Member()
        self.callback(member.close)
        return member

    def answering(self, answer):
        """Have something else than a control node answer the next connection; return the port."""
        server = self.enter_context(socket.create_server((HOST, 0)))

        def serve():
            sock, _ = server.accept()
            server.close()
            with sock:
                sock.settimeout(limit_s(HANG_S))
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        self.callback(thread.join)
        return server.getsockname()[1]


@pytest.fixture
def opened():
    with Opened() as opened:
        yield opened


# --- a node that tests play by hand ---------------------------------------------------------------


def mac(token, role, nonce):
    return hmac.new(token.encode(), role + b"\0" + nonce, hashlib.sha256).digest()


def receive(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "closed early"
        data += piece
    return data


def receive_message(sock):
    return decode(receive(sock, *LENGTH.unpack(receive(sock, LENGTH.size))))


def raw_connection(control):
    return socket.create_connection((HOST, control.port), timeout=limit_s(HANG_S))


def shake_hands(sock, token):
    """Do what a member does before its join."""
    greeting = receive(sock, len(MAGIC) + 32)
    assert greeting.startswith(MAGIC)
    nonce = b"n" * 32
    sock.sendall(nonce + mac(token, b"member", greeting[len(MAGIC) :]))
    assert receive(sock, 32) == mac(token, b"control", nonce)


@contextmanager
def raw_member(control):
    """Do by hand what a member does, up to its join."""
    with raw_connection(control) as sock:
        shake_hands(sock, control.token)
        sock.sendall(encode(sent.Join(node=1, host="host-1", task="a task")))
        yield sock


def is_closed(sock):
    """Tell whether the other side closes the connection in time; what it sends before does not matter."""
    deadline = time.monotonic() + limit_s(HANG_S)
    try:
        while True:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            if not sock.recv(65536):
                return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


# --- unauthenticated connections ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "knows_token"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: control\r\n\r\n" + b"x" * 64, False, id="http"),
        pytest.param(MAGIC + b"x" * 64, False, id="our magic"),
        pytest.param(struct.pack(">I", 0xFFFFFFFF) + b"x" * 1000, True, id="4 GB"),
        pytest.param(struct.pack(">I", 4) + b"\xff\xfe{}", True, id="no json"),
        pytest.param(struct.pack(">I", len(PICKLED)) + PICKLED, True, id="a pickle"),
        pytest.param(encode(sent.Leave("left")), True, id="no join"),
        *(pytest.param(encode(sent.Join(node)), True, id=f"node {node}") for node in (99, -1, 0)),
    ],
)
def test_nonsense_is_hung_up_on_and_members_are_still_served(words, knows_token, opened):
    control = opened.control()
    with raw_connection(control) as sock:
        sock.sendall(words[:31])  # one that ends half way does no harm either
    with raw_connection(control) as sock:
        if knows_token:
            shake_hands(sock, control.token)
        sock.sendall(words)
        assert is_closed(sock)
    opened.member().join(control).leave_well(control)


@pytest.mark.parametrize("whose", [b"member", b"control"], ids=["recorded", "mirrored"])
def test_a_proof_is_worth_nothing_on_another_connection_or_in_another_role(whose, opened):
    control = opened.control()
    with raw_connection(control) as first, raw_connection(control) as second:
        greetings = [receive(sock, len(MAGIC) + 32) for sock in (first, second)]
        challenge = greetings[whose == b"control"][len(MAGIC) :]
        second.sendall(b"n" * 32 + mac(control.token, whose, challenge) + encode(sent.Join(node=1, host="evil")))
        assert is_closed(second)


def test_a_member_that_sends_too_long_a_frame_is_lost_and_the_control_node_is_not(opened):
    control = opened.control()
    with raw_member(control) as sock:
        sock.sendall(struct.pack(">I", 0x7FFFFFFF) + b"x" * 1000)
        assert is_closed(sock)
    message = control.inbox.error()
    assert "Node 1 (host host-1)" in message
    assert "a frame of 2147483647 bytes" in message


@pytest.mark.parametrize(
    ("greeting", "answered"),
    [(MAGIC + b"x" * 64, 64), (b"220 smtp.example.org ESMTP ready, and much more than forty-eight bytes\r\n", 0)],
    ids=["can't prove itself", "another service"],
)
def test_a_member_does_not_trust_whoever_answers(greeting, answered, opened):
    heard = queue.SimpleQueue()

    def answer(sock):
        sock.sendall(greeting)
        with sock.makefile("rb") as said:
            heard.put(said.read())

    with pytest.raises(ConnectionError, match="token"):
        opened.member().connect([HOST], opened.answering(answer), secrets.token_hex(), 10.0)
    assert len(heard.get(timeout=limit_s(HANG_S))) == answered  # its own proof, but not its join


# --- one process for each node --------------------------------------------------------------------


def test_a_member_whose_first_connection_was_lost_unseen_gets_in_by_another(opened):
    control = opened.control()
    with raw_member(control) as first:
        assert isinstance(receive_message(first), sent.Answer)
        with raw_member(control) as again:
            assert isinstance(receive_message(again), sent.Answer)
            assert is_closed(first)
            assert control.gang.members == {1}
            again.sendall(encode(sent.Leave("left")))
            assert receive_message(again) == sent.Farewell("received")
    assert control.gang.broken is None
