"""Real sockets: members are served, strangers are not, silence is noticed."""

import asyncio
import hashlib
import hmac
import json
import os
import queue
import resource
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager

import psutil
import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun import channel as channel_module
from metaflow_extensions.torchrun.plugins.torchrun.channel import ControlChannel, MemberChannel, new_token
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.gang import Gang, Settings
from metaflow_extensions.torchrun.plugins.torchrun.network import free_port

HOST = "127.0.0.1"
FACTS = {"launch": 0, "nproc": 1, "torch": "2.13.0", "python": "3.11.7", "digest": "abc"}
MAGIC = b"mf-torchrun/1\0\0\0"


def _ipv6_works():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _ipv6_works(), reason="this machine has no IPv6 loopback address")


class Inbox:
    """A node's mail, readable with a deadline."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        self.seen = []

    def __call__(self, message):
        self._queue.put(message)

    def expect(self, kind, deadline_s=10.0):
        """Return the next message of a kind; others on the way are kept in `seen`."""
        deadline = time.monotonic() + deadline_s
        while True:
            message = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            self.seen.append(message["type"])
            if message["type"] == kind:
                return message


def once(function, **defaults):
    """Return a function that calls `function` the first time only."""
    left = [function]
    return lambda **given: left and left.pop()(**{**defaults, **given})


class Control:
    """The control node's side of a test."""

    def __init__(self, num_nodes, heartbeat_s, started_timeout_s=60.0, host=HOST):
        self.inbox, self.token = Inbox(), new_token()
        gang = Gang(Settings(num_nodes, started_timeout_s, 1.0), lambda pinned: pinned or free_port(HOST))
        self.channel = ControlChannel(gang, self.inbox, self.token, heartbeat_s)
        self.port = self.channel.listen(None, host)
        self.channel.send({"type": "join", "node": 0, "host": "host-0"})
        self.inbox.expect("welcome")
        self.close = once(self.channel.close, wait_s=0.0)


@pytest.fixture
def rooms():
    """Close everything that a test opens, whatever happens; last opened, first closed."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def control(rooms):
    def start(num_nodes=2, heartbeat_s=20.0, **more):
        made = Control(num_nodes, heartbeat_s, **more)
        rooms.callback(made.close)
        return made

    return start


@pytest.fixture
def member(rooms):
    def start(control, node, token=None, timeout_s=10.0, heartbeat_s=20.0, addresses=(HOST,), connect=True):
        inbox = Inbox()
        made = MemberChannel(node, inbox, heartbeat_s)
        made.close = once(made.close)
        rooms.callback(made.close)
        made.inbox = inbox
        if connect:
            made.address = made.connect(addresses, control.port, token or control.token, timeout_s)
        return made

    return start


def mac(token, role, nonce):
    return hmac.new(token.encode(), role + b"\0" + nonce, hashlib.sha256).digest()


def frame(message):
    data = json.dumps(message).encode()
    return struct.pack(">I", len(data)) + data


@contextmanager
def stranger(control):
    with socket.create_connection((HOST, control.port), timeout=10.0) as sock:
        yield sock


def receive(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "closed early"
        data += piece
    return data


def shake_hands(sock, token):
    """Do by hand what a member does, up to its join."""
    greeting = receive(sock, len(MAGIC) + 32)
    assert greeting.startswith(MAGIC)
    nonce = b"n" * 32
    sock.sendall(nonce + mac(token, b"member", greeting[len(MAGIC) :]))
    assert receive(sock, 32) == mac(token, b"control", nonce)


def connections_to(port):
    """Return the states of this process's connections to a port."""
    return [c.status for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]


def is_closed(sock, deadline_s=5.0):
    """Tell whether the other side hangs up in time; what it sends before does not matter."""
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


# --- the good way --------------------------------------------------------------------------------


def test_a_launch_from_join_to_verdict(control, member):
    table = control(3)
    members = [member(table, node) for node in (1, 2)]
    sends, inboxes = [table.channel, *members], [table.inbox, *(m.inbox for m in members)]
    for inbox in inboxes[1:]:
        assert inbox.expect("welcome")["num_nodes"] == 3
    for send in sends:
        send.send({"type": "ready", **FACTS})
    goes = [inbox.expect("go") for inbox in inboxes]
    assert goes[0] == goes[1] == goes[2]
    for send in sends:
        send.send({"type": "ended", "launch": 0, "generation": 0, "ok": True, "causes": []})
    assert [inbox.expect("verdict")["error"] for inbox in inboxes] == [None] * 3


def test_a_failure_on_one_node_reaches_all_with_its_text_unharmed(control, member):
    table = control(2)
    one = member(table, 1)
    text = 'ValueError: größe\n"quoted" \\ 🙂 \x00'
    cause = {"kind": "exception", "node": 1, "host": "h", "rank": 1, "local_rank": 0, "exit_code": 1, "exception": text}
    for send in (table.channel, one):
        send.send({"type": "ready", **FACTS})
    one.inbox.expect("go")
    report = {"launch": 0, "generation": 0, "causes": [{"cause": cause, "age_s": 0.1}]}
    one.send({"type": "ended", "ok": False, **report})
    table.inbox.expect("stop")
    table.channel.send({"type": "ended", "ok": False, "launch": 0, "generation": 0, "causes": []})
    errors = [inbox.expect("verdict")["error"] for inbox in (table.inbox, one.inbox)]
    assert errors[0] == errors[1]
    assert text in errors[0]["message"]


def test_the_address_that_works_is_told(control, member):
    table = control(2)
    assert member(table, 1, addresses=["127.0.0.1.invalid", "127.255.255.1", HOST]).address == HOST


@pytest.mark.parametrize(
    ("host", "address"),
    [("", HOST), (HOST, HOST), *(pytest.param(host, "::1", marks=needs_ipv6) for host in ("", "::1"))],
)
def test_members_come_by_ipv4_and_by_ipv6(host, address, control, member):
    table = control(2, host=host)
    one = member(table, 1, addresses=[address])
    assert one.address == address
    for send in (table.channel, one):
        send.send({"type": "ready", **FACTS})
    # Each node learns by which of its own addresses the other knows it.
    assert [inbox.expect("go")["own_address"] for inbox in (table.inbox, one.inbox)] == [address, address]


def test_addresses_that_never_answer_are_tried_side_by_side(control, member, rooms):
    table = control(2)
    silent = [f"127.0.0.{number}" for number in range(2, 6)]
    for address in silent:  # the kernel connects, and then nobody speaks
        rooms.enter_context(socket.create_server((address, table.port)))
    begun = time.monotonic()
    one = member(table, 1, addresses=[*silent, HOST])
    assert one.address == HOST
    assert time.monotonic() - begun < 3.0  # one after the other, it would be 20
    eventually(lambda: connections_to(table.port) == ["ESTABLISHED"], "hanging up on the silent", deadline_s=2.0)


def test_however_many_addresses_there_are_all_get_their_turn_in_time(control, member, rooms):
    table = control(2)
    silent = [f"127.0.1.{number}" for number in range(1, 101)]
    for address in silent:
        rooms.enter_context(socket.create_server((address, table.port)))
    begun = time.monotonic()
    member(table, 1, addresses=[*silent, HOST], timeout_s=10.0)
    assert time.monotonic() - begun < 6.0


def test_of_many_addresses_that_work_one_connection_stays(control, member, monkeypatch):
    monkeypatch.setattr(channel_module, "_STAGGER_S", 0.0)  # all at the same moment
    table = control(2, host="")
    one = member(table, 1, addresses=[f"127.0.0.{number}" for number in range(1, 30)])
    one.inbox.expect("welcome")
    eventually(lambda: connections_to(table.port) == ["ESTABLISHED"], "closing all connections but one")
    one.send({"type": "leave", "cause": None})  # and it is the one that was taken
    one.inbox.expect("ack")
    assert "abort" not in table.inbox.seen


def test_a_connection_that_opens_when_another_has_won_is_closed(control, rooms):
    table = control(2)
    one = MemberChannel(1, Inbox(), 20.0)
    rooms.callback(one.close)

    async def open_and_give_up():
        knock = asyncio.ensure_future(one._knock(HOST, table.port, table.token))
        link = await knock
        await channel_module._give_up({knock})
        return link.is_closing()

    assert one._thread.call(open_and_give_up(), 10.0)


def test_a_control_node_that_is_nowhere_is_given_up_in_time(rooms):
    with socket.create_server((HOST, 0)) as silent:
        lost = MemberChannel(1, Inbox(), 20.0)
        rooms.callback(lost.close)
        begun = time.monotonic()
        with pytest.raises(GangError, match=r"tried 127\.0\.0\.1 on port \d+ for 0\.5 s.*channel_port"):
            lost.connect([HOST], silent.getsockname()[1], new_token(), 0.5)
        assert time.monotonic() - begun < 3.0


def test_a_member_that_is_early_waits_for_the_control_node(rooms):
    port, inbox, result = free_port(HOST), Inbox(), queue.SimpleQueue()
    token = new_token()
    early = MemberChannel(1, inbox, 20.0)
    rooms.callback(early.close)
    thread = threading.Thread(target=lambda: result.put(early.connect([HOST], port, token, 20.0)))
    thread.start()
    gang = Gang(Settings(2, 60.0, 1.0), lambda pinned: pinned)
    late = ControlChannel(gang, Inbox(), token, 20.0)
    rooms.callback(late.close, 0.0)
    assert late.listen(port, HOST) == port
    assert result.get(timeout=20.0) == HOST
    thread.join()
    inbox.expect("welcome")


def test_heartbeats_keep_idle_connections_alive(control, member):
    table = control(2, heartbeat_s=0.5)
    one = member(table, 1, heartbeat_s=0.5)
    one.inbox.expect("welcome")
    with pytest.raises(queue.Empty):  # neither side takes the other's idleness for death
        one.inbox.expect("control_lost", 1.5)
    one.send({"type": "leave", "cause": None})
    one.inbox.expect("ack")
    assert "abort" not in table.inbox.seen


def test_closing_waits_for_members_that_have_yet_to_leave(control, member):
    table = control(2)
    one = member(table, 1)
    one.inbox.expect("welcome")
    table.channel.send({"type": "leave", "cause": None})
    one.inbox.expect("bye")
    one.send({"type": "leave", "cause": None})
    begun = time.monotonic()
    table.close(wait_s=30.0)
    assert time.monotonic() - begun < 10.0
    one.inbox.expect("ack")


def test_a_taken_channel_port_names_the_setting(rooms):
    with socket.create_server((HOST, 0)) as taken:
        channel = ControlChannel(Gang(Settings(2), lambda _: None), Inbox(), new_token(), 20.0)
        rooms.callback(channel.close, 0.0)
        with pytest.raises(GangError, match=r"channel port \d+.*channel_port"):
            channel.listen(taken.getsockname()[1], HOST)


@pytest.mark.parametrize("host", ["0.0.0.0", pytest.param("::", marks=needs_ipv6)])
def test_a_channel_port_taken_for_one_family_only_is_taken(host, rooms):
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        channel = ControlChannel(Gang(Settings(2), lambda _: None), Inbox(), new_token(), 20.0)
        rooms.callback(channel.close, 0.0)
        with pytest.raises(GangError, match="channel_port"):
            channel.listen(taken.getsockname()[1])


def test_a_host_without_ipv6_listens_by_ipv4(control, member, monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    table = control(2, host="")
    assert member(table, 1).address == HOST


def test_tokens_are_fresh_and_long():
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) >= 64


# --- strangers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [b"\0" * 64, b"GET / HTTP/1.1\r\nHost: control\r\n\r\n" + b"x" * 64, b"\xff" * 100_000, MAGIC + b"x" * 64],
    ids=["zeros", "http", "flood", "our magic"],
)
def test_garbage_is_hung_up_on_and_members_are_still_served(words, control, member):
    table = control()
    with stranger(table) as sock:
        sock.sendall(words)
        assert is_closed(sock)
    member(table, 1).inbox.expect("welcome")


def test_a_stranger_that_hangs_up_half_way_does_no_harm(control, member):
    table = control()
    for count in (0, 1, 31, 63):
        with stranger(table) as sock:
            sock.sendall(b"x" * count)
    member(table, 1).inbox.expect("welcome")


def test_a_recorded_proof_is_worth_nothing_on_another_connection(control):
    table = control()
    with stranger(table) as first:
        proof = b"n" * 32 + mac(table.token, b"member", receive(first, len(MAGIC) + 32)[len(MAGIC) :])
        with stranger(table) as second:
            receive(second, len(MAGIC) + 32)
            second.sendall(proof + frame({"type": "join", "node": 1, "host": "evil"}))
            assert is_closed(second)


def test_the_control_nodes_own_proof_can_not_be_mirrored(control):
    table = control()
    with stranger(table) as sock:
        greeting = receive(sock, len(MAGIC) + 32)
        sock.sendall(b"n" * 32 + mac(table.token, b"control", greeting[len(MAGIC) :]))
        assert is_closed(sock)


@pytest.mark.parametrize(
    "words",
    [
        struct.pack(">I", 0xFFFFFFFF) + b"x" * 1000,
        struct.pack(">I", 1024 * 1024 + 1),
        struct.pack(">I", 4) + b"\xff\xfe{}",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 0),
        frame({"type": "leave", "node": 1}),
        frame({"type": "join"}),
        frame({"type": "join", "node": "1"}),
        frame({"type": "join", "node": 99}),
        frame({"type": "join", "node": -1}),
        frame({"type": "join", "node": 0}),
    ],
    ids=[
        "4 GB",
        "over 1 MB",
        "no json",
        "a list",
        "empty",
        "no join",
        "no node",
        "text",
        "node 99",
        "node -1",
        "control",
    ],
)
def test_one_who_knows_the_token_but_talks_nonsense_is_hung_up_on(words, control, member):
    table = control()
    with stranger(table) as sock:
        shake_hands(sock, table.token)
        sock.sendall(words)
        assert is_closed(sock)
    member(table, 1).inbox.expect("welcome")


def test_a_huge_frame_of_a_member_loses_it_and_not_the_control_node(control):
    table = control(2)
    with stranger(table) as sock:
        shake_hands(sock, table.token)
        sock.sendall(frame({"type": "join", "node": 1, "host": "host-1"}))
        sock.sendall(struct.pack(">I", 0x7FFFFFFF) + b"x" * 1000)
        assert is_closed(sock)
    assert "Node 1 (host host-1)" in table.inbox.expect("abort")["error"]["message"]


def test_a_member_with_the_wrong_token_gets_a_clear_error_in_time(control, member):
    table = control()
    begun = time.monotonic()
    with pytest.raises(GangError) as caught:
        member(table, 1, token=new_token(), timeout_s=0.5)
    assert time.monotonic() - begun < 5.0
    assert f"{HOST} on port {table.port}" in str(caught.value)
    member(table, 1).inbox.expect("welcome")


def test_a_member_does_not_trust_a_control_node_that_can_not_prove_itself(rooms):
    with socket.create_server((HOST, 0)) as fake:
        impostor = MemberChannel(1, Inbox(), 20.0)
        rooms.callback(impostor.close)
        heard = []

        def answer():
            sock, _ = fake.accept()
            fake.close()
            with sock:
                sock.settimeout(10.0)
                sock.sendall(MAGIC + b"x" * 32)
                receive(sock, 64)
                sock.sendall(b"y" * 32)
                heard.append(sock.recv(1000))

        thread = threading.Thread(target=answer)
        thread.start()
        port = fake.getsockname()[1]
        with pytest.raises(GangError):
            impostor.connect([HOST], port, new_token(), 0.3)
        thread.join()
    assert heard == [b""]  # not even its join


def test_another_service_on_the_port_is_no_control_node(rooms):
    with socket.create_server((HOST, 0)) as other:
        lost = MemberChannel(1, Inbox(), 20.0)
        rooms.callback(lost.close)

        def answer():
            sock, _ = other.accept()
            other.close()
            with sock:
                sock.sendall(b"220 smtp.example.org ESMTP ready, and much more than forty-eight bytes\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = other.getsockname()[1]
        with pytest.raises(GangError, match="can't reach the control node"):
            lost.connect([HOST], port, new_token(), 0.3)
        thread.join()


def test_who_says_nothing_is_hung_up_on_in_time(control, rooms, monkeypatch):
    monkeypatch.setattr(channel_module, "_HANDSHAKE_S", 0.3)
    table = control()
    assert is_closed(rooms.enter_context(stranger(table)))


def test_when_strangers_hold_all_places_they_have_to_hurry_and_a_member_gets_in(control, member, rooms, monkeypatch):
    monkeypatch.setattr(channel_module, "_MAX_STRANGERS", 10)
    monkeypatch.setattr(channel_module, "_HURRY_S", 0.3)
    table = control()
    crowd = [rooms.enter_context(stranger(table)) for _ in range(50)]
    one = member(table, 1)
    one.inbox.expect("welcome")
    assert is_closed(crowd[0])
    one.send({"type": "leave", "cause": None})
    one.inbox.expect("ack")
    assert "abort" not in table.inbox.seen


def test_hundreds_may_knock_at_the_same_moment(control, rooms):
    table = control()
    busy = threading.Event()
    rooms.callback(busy.set)
    table.channel._thread.post(busy.wait, 10.0)  # nobody answers the door for now; the kernel keeps the queue
    for _ in range(300):
        rooms.enter_context(socket.create_connection((HOST, table.port), timeout=0.8))


# --- seats, silence and death ----------------------------------------------------------------------


def test_a_second_task_on_the_same_seat_is_refused_and_the_first_stays(control, member):
    table = control(2)
    first = member(table, 1)
    first.inbox.expect("welcome")
    begun = time.monotonic()
    with pytest.raises(GangError, match=r"Node 1 .* was turned away.*another task .* the same node index"):
        member(table, 1)
    assert time.monotonic() - begun < 5.0
    first.send({"type": "leave", "cause": None})
    first.inbox.expect("ack")


def test_a_task_that_comes_to_replace_another_waits_for_the_gangs_end(control, member, monkeypatch):
    """Kubernetes starts it while the first one's pod still has its grace; its end would have all pods killed."""
    table = control(2, heartbeat_s=0.4)
    first = member(table, 1, heartbeat_s=0.4)
    first.inbox.expect("welcome")
    monkeypatch.setattr(channel_module, "place", lambda: "another pod")
    second = member(table, 1, heartbeat_s=0.4, connect=False)
    with pytest.raises(
        TorchrunPreempted, match=r"Node 1 .* was turned away.*the task that it is to replace still runs"
    ):
        second.connect((HOST,), table.port, table.token, 10.0)
    assert "it is being replaced" in first.inbox.expect("replaced")["why"]
    assert "node 1 (host" in table.inbox.expect("note")["text"]
    second.send({"type": "leave", "cause": None})  # its words don't count
    with pytest.raises(queue.Empty):
        second.inbox.expect("control_lost", 1.0)  # longer than either may be silent
    assert table.channel.gang.members == [1]
    assert second.hold_s == 1.0 + 15.0
    table.close()
    second.inbox.expect("control_lost")


def test_a_member_whose_first_connection_was_lost_unseen_gets_in_by_another(control, member):
    table = control(2)
    first = member(table, 1)
    again = member(table, 1, connect=False)
    again._join = first._join  # the same process
    again.connect((HOST,), table.port, table.token, 10.0)
    again.inbox.expect("welcome")
    first.inbox.expect("control_lost")
    assert table.channel.gang.members == [1]


def test_a_connection_that_closes_is_noticed_at_once(control):
    table = control(2)
    with stranger(table) as sock:
        shake_hands(sock, table.token)
        sock.sendall(frame({"type": "join", "node": 1, "host": "host-1"}))
        receive(sock, 4)
    begun = time.monotonic()
    message = table.inbox.expect("abort")["error"]["message"]
    assert time.monotonic() - begun < 2.0
    assert "Node 1 (host host-1)" in message
    assert "connection to the control node was closed" in message


@contextmanager
def forked_child():
    """Have a child of this process, forked as `multiprocessing` does it, that lives on."""
    mine, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(its)
        os.read(mine, 1)
        os._exit(0)
    os.close(mine)
    try:
        yield
    finally:
        os.close(its)
        os.waitpid(pid, 0)


@pytest.fixture(params=[None, 256], ids=["limit of files as it is", "connections above the limit of files"])
def limited_files(request):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (request.param or soft, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_that_a_task_has_forked_does_not_hold_its_connection(control, member, limited_files):
    made = control(3, heartbeat_s=20.0)
    first, second = member(made, 1), member(made, 2)
    with forked_child():
        begun = time.monotonic()
        first.close()  # as the kernel does for a task that is killed
        abort = second.inbox.expect("abort")
        assert "its connection to the control node was closed" in abort["error"]["message"]
        second.send({"type": "leave", "cause": None})  # the task itself still hears and is heard
        second.inbox.expect("ack")
        made.close()
        second.inbox.expect("control_lost", 3.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, made.port), timeout=5.0)
        assert time.monotonic() - begun < 5


def test_a_member_that_falls_silent_is_lost_after_the_heartbeat_timeout(control):
    table = control(2, heartbeat_s=0.3)
    with stranger(table) as sock:
        shake_hands(sock, table.token)
        sock.sendall(frame({"type": "join", "node": 1, "host": "host-1"}))
        message = table.inbox.expect("abort", 5.0)["error"]["message"]
        assert "nothing was heard from it for 0.3 s (heartbeat_timeout_s)" in message
        assert is_closed(sock)


def test_members_notice_at_once_that_the_control_node_is_gone(control, member):
    table = control(2)
    one = member(table, 1)
    one.inbox.expect("welcome")
    table.close()
    assert "connection was closed" in one.inbox.expect("control_lost", 3.0)["reason"]


@pytest.mark.parametrize("welcome", [True, False], ids=["after its welcome", "before"])
def test_a_control_node_that_falls_silent_is_lost(welcome, rooms):
    token = new_token()
    with socket.create_server((HOST, 0)) as fake:
        one, inbox, done = MemberChannel(1, Inbox(), 0.3), None, threading.Event()
        inbox = one._deliver
        rooms.callback(one.close)

        def answer():
            sock, _ = fake.accept()
            with sock:
                sock.settimeout(10.0)
                nonce = b"c" * 32
                sock.sendall(MAGIC + nonce)
                said = receive(sock, 64)
                assert said[32:] == mac(token, b"member", nonce)
                sock.sendall(mac(token, b"control", said[:32]))
                if welcome:
                    sock.sendall(frame({"type": "welcome"}))
                done.wait(10.0)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            if welcome:
                one.connect([HOST], fake.getsockname()[1], token, 5.0)
                assert "nothing was heard from it for 0.3 s" in inbox.expect("control_lost", 5.0)["reason"]
            else:
                with pytest.raises(GangError, match=r"got no answer within 0\.3 s \(heartbeat_timeout_s\)"):
                    one.connect([HOST], fake.getsockname()[1], token, 5.0)
        finally:
            done.set()
            thread.join()


def test_a_task_known_to_be_dead_is_reported_without_waiting_for_its_silence(control):
    table = control(3)
    table.channel.report_gone(2, "its task was killed by SIGKILL")
    assert "its task was killed by SIGKILL" in table.inbox.expect("abort", 3.0)["error"]["message"]


def test_what_is_raised_in_the_control_nodes_loop_breaks_the_gang_with_its_text(control, member):
    table = control(2)
    one = member(table, 1)
    one.send({"type": "ready"})  # without the launch's number, which no node of ours leaves out
    for inbox in (table.inbox, one.inbox):
        text = inbox.expect("abort", 5.0)["error"]["message"]
        assert "channel failed on the control node" in text
        assert "KeyError: 'launch'" in text


def test_a_message_that_can_not_be_sent_is_told_to_all(control, member):
    table = control(2)
    one = member(table, 1)
    one.inbox.expect("welcome")
    one.send({"type": "ended", "deposits": {str(rank): "k" * 100 for rank in range(20_000)}})
    assert "a 'ended' message of" in one.inbox.expect("control_lost", 5.0)["reason"]
    assert "Node 1" in table.inbox.expect("abort", 5.0)["error"]["message"]


def test_even_when_nothing_can_be_sent_any_more_all_hear_of_it(control, member, monkeypatch):
    table = control(2)
    one = member(table, 1)
    one.inbox.expect("welcome")

    def full(message):
        raise MemoryError("no memory")

    monkeypatch.setattr(channel_module, "encode", full)
    table.channel.send({"type": "leave", "cause": None})  # which says *bye* to the member
    assert "MemoryError: no memory" in table.inbox.expect("abort", 5.0)["error"]["message"]
    one.inbox.expect("control_lost", 5.0)


def test_a_member_that_is_cut_off_before_its_welcome_knocks_again(control, member, monkeypatch):
    table = control(2)
    take_in, cut = table.channel._take_in, []

    def cut_once(link, hello):
        if cut:
            take_in(link, hello)
        else:
            cut.append(link)
            link.hang_up("cut")

    monkeypatch.setattr(table.channel, "_take_in", cut_once)
    begun = time.monotonic()
    one = member(table, 1)
    one.inbox.expect("welcome")
    assert time.monotonic() - begun < 3.0
    assert len(cut) == 1
    assert "control_lost" not in one.inbox.seen


def test_a_frame_that_is_refused_says_so(control, rooms):
    table = control(2)
    sock = rooms.enter_context(stranger(table))
    shake_hands(sock, table.token)
    sock.sendall(frame({"type": "join", "node": 1, "host": "host-1"}) + struct.pack(">I", 1024 * 1024 + 1))
    assert "a frame of 1048577 bytes is over the limit" in table.inbox.expect("abort", 5.0)["error"]["message"]


def test_time_passes_without_any_message(control):
    table = control(2, started_timeout_s=0.2)
    assert "node 1 of 2 did not arrive" in table.inbox.expect("abort", 5.0)["error"]["message"]


def test_a_closed_channel_leaves_no_thread_and_swallows_late_words(control, member):
    table = control(2)
    one = member(table, 1)
    one.inbox.expect("welcome")
    one.close()
    table.close()
    one.send({"type": "ready", **FACTS})
    table.channel.send({"type": "ready", **FACTS})
    table.channel.report_gone(1, "late")
    eventually(lambda: not [t for t in threading.enumerate() if t.name in ("torchrun-control", "torchrun-member")])
