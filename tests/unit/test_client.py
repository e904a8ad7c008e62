"""A task and its supervisor, as two processes."""

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from itertools import chain, repeat
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from unit_helpers import HANG_S, eventually, is_running

from metaflow_extensions.torchrun.plugins.torchrun.channel.client import ControlClient, MemberClient, SupervisorGone
from metaflow_extensions.torchrun.plugins.torchrun.channel.codec import packets
from metaflow_extensions.torchrun.plugins.torchrun.channel.connection import new_token
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.gang.nodes import NodeState
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import ConnectPolicy, Rules
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import (
    Abort,
    Join,
    Leave,
    Note,
    TaskEnded,
    Welcome,
    to_wire,
)
from metaflow_extensions.torchrun.plugins.torchrun.machine import processes
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import pick_port
from metaflow_extensions.torchrun.plugins.torchrun.machine.wake import SIGNAL
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import process as supervising

HOST = "127.0.0.1"
RULES = Rules(60.0, 1.0)


@pytest.fixture
def gang():
    """Return functions that make the clients of a control node and of members; all are closed."""
    made = []

    class Heard(list):
        def of(self, kind):
            return [each for each in self if isinstance(each, kind)]

    def noted(new_client):
        heard, gone, lost = Heard(), [], []
        listener = SimpleNamespace(
            emit=lambda event: None,
            deliver=heard.append,
            lose_control=lost.append,
            lose_supervisor=gone.append,
            notice=lambda why: None,
        )
        made.append(new_client(listener))
        made[-1].heard, made[-1].gone, made[-1].lost = heard, gone, lost
        return made[-1]

    def control(num_nodes=2, silence_s=20.0):
        token = new_token()
        client = noted(lambda listener: ControlClient(num_nodes, listener, silence_s, token, RULES, {}))
        client.send(Join(0, "host-0"))
        client.token = token
        return client

    def member(node=1):
        return noted(lambda listener: MemberClient(node, 2, listener, 20.0, 5.0, ConnectPolicy(attempt_s=1.0), {}))

    yield control, member
    for each in made:
        each.close()


def test_a_gang_joins_and_what_is_known_of_it_stays_known(gang):
    control, member = gang[0](), gang[1]()
    port = control.listen(None, HOST)
    assert control.absent == [1]
    assert member.connect([HOST], port, control.token, 5.0) == HOST
    assert eventually(lambda: control.members == [1])
    assert member.wait(lambda: member.heard.of(Welcome), HANG_S)
    assert control.counts()[0] == 2
    member.close()
    eventually(lambda: control.states()[1] is NodeState.LOST)
    control.close()
    assert [event.kind for event in control.snapshot({"command": "x"}).events][:2] == ["joined", "joined"]
    assert control.snapshot({"command": "x"}).command == "x"
    assert control.states()[1] is NodeState.LOST


def test_what_a_call_raises_is_raised_in_the_task(gang):
    control, member = gang[0](), gang[1]()
    with socket.create_server((HOST, 0)) as taken, pytest.raises(GangError, match="channel_port"):
        control.listen(taken.getsockname()[1], HOST)
    with pytest.raises(ConnectionRefusedError):
        member.connect([HOST], pick_port(), "secret", 5.0)
    port = control.listen(None, HOST)
    with pytest.raises(ConnectionError, match="token"):
        member.connect([HOST], port, "another", 5.0)
    assert member.connect([HOST], port, control.token, 5.0) == HOST
    second = gang[1]()
    with pytest.raises(GangError, match="same node index"):
        second.connect([HOST], port, control.token, 5.0)


def test_a_supervisor_that_is_killed_is_missed_at_once_and_no_call_waits(gang):
    control = gang[0]()
    control.listen(None, HOST)
    os.kill(control.pid, signal.SIGKILL)
    assert not control.wait(lambda: False, HANG_S)
    assert control.gone == [f"its supervisor process (pid {control.pid}) ended unexpectedly, as by SIGKILL"]
    with pytest.raises(SupervisorGone, match=rf"pid {control.pid}"):
        control.call("view")
    assert control.absent == [0, 1], "nothing was asked before"
    known = control.snapshot({})
    assert known.summary.outcome == "failed"
    assert f"pid {control.pid}" in known.error


def test_nobody_misses_a_supervisor_whose_last_words_are_on_their_way(gang, monkeypatch):
    """Who stores what is known of the gang may see its end first, on the second connection."""
    control = gang[0]()
    control.listen(None, HOST)
    call, known = control.call, []

    def call_slowly(*args, **more):
        words = call(*args, **more)
        assert eventually(lambda: control._asking.wait(0.1) or control._asking.end is not None)
        assert eventually(lambda: control.wait(lambda: control.is_gone, 0.1))
        known.append((control.counts()[0], control.snapshot({}).error))
        return words

    before = control.counts()[0]
    monkeypatch.setattr(control, "call", call_slowly)
    control.close()
    assert known == [(before, None)]


def test_a_supervisor_that_is_killed_before_its_last_words_is_missed(gang, monkeypatch):
    control = gang[0]()
    control.listen(None, HOST)
    call = control.call

    def kill_and_call(*args, **more):
        os.kill(control.pid, signal.SIGKILL)
        return call(*args, **more)

    monkeypatch.setattr(control, "call", kill_and_call)
    control.close()
    assert f"pid {control.pid}" in control.snapshot({}).error


def test_a_step_that_closes_all_descriptors_hears_so_and_nobody_waits(gang):
    control = gang[0]()
    control.listen(None, HOST)
    pid = control.pid
    for each in (control._link._socket, control._asking._socket):
        os.close(each.fileno())
    try:
        control.look()
        assert "its code has closed the connection" in control.gone[0]
        assert eventually(lambda: not is_running(pid), within_s=30)
        with pytest.raises(SupervisorGone):
            control.call("view")
        assert control.absent == [0, 1]
    finally:
        for each in (control._link._socket, control._asking._socket):
            each.detach()


def test_the_number_of_a_closed_connection_may_be_another_files(gang):
    control = gang[0]()
    control.listen(None, HOST)
    number = control._link._socket.fileno()
    before = os.fstat(number)
    own, theirs = socket.socketpair()
    with own, theirs:
        os.dup2(own.fileno(), number)
        theirs.send(b"not ours")
        control.send(Leave())
        control.look()
        assert "its code has closed the connection" in control.gone[0]
        assert own.recv(100) == b"not ours"
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        assert os.fstat(number).st_ino != before.st_ino
        os.close(number)


def test_a_supervisor_is_no_child_of_its_task_and_ends_with_it(gang):
    control = gang[0]()
    control.listen(None, HOST)
    assert psutil.Process(control.pid).ppid() != os.getpid()
    pid = control.pid
    control.close()
    assert eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    control.close()  # once more


class Side:
    """What a supervisor does for its task, noted."""

    def __init__(self):
        self.sent, self.has_ended = [], False
        self.seat = SimpleNamespace(node=0)

    def send(self, message):
        self.sent.append(message)

    async def end(self):
        self.has_ended = True


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its task was killed by SIGKILL"),
        ("import os; os._exit(3)", "its task exited with code 3"),
    ],
)
def test_the_end_of_a_task_is_told_with_its_signal_or_code(how, said):
    assert ended(how).startswith(said)


def test_a_task_that_is_killed_for_memory_is_told_so(monkeypatch):
    monkeypatch.setattr(supervising, "oom_kills", lambda: 3 if living else 4)
    living = [True]

    async def await_death(served):
        living.clear()

    monkeypatch.setattr(supervising.Supervisor, "_await_death", await_death)
    said = ended("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert said.startswith("its task ran out of memory: ")


def test_what_a_task_has_sent_before_it_is_killed_is_heard_first():
    (left, end) = told_of(
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", packets(["send", to_wire(Leave())])[0]
    )
    assert (left, type(end)) == (Leave(), TaskEnded)


def ended(how):
    """Return what a supervisor says of a task that ends in this way; nobody reaps it before."""
    (message,) = told_of(how)
    assert isinstance(message, TaskEnded)
    return message.how


def told_of(how, last_words=b""):
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen([sys.executable, "-c", "input();" + how], stdin=subprocess.PIPE) as task:
        served = supervising.Supervisor(processes.Other(task.pid, processes.began(task.pid)), theirs)
        served._side, served._launches = (side := Side()), Mock(runs=True, close=AsyncMock())
        before = [os.dup(stream) for stream in (1, 2)]
        task.stdin.write(b"\n")
        task.stdin.flush()
        eventually(lambda: served._task.has_ended)
        own.send(last_words) if last_words else None
        own.close()
        asyncio.run(served.run())
        for stream, file in zip((1, 2), before, strict=True):
            os.dup2(file, stream)
            os.close(file)
    theirs.close()
    assert side.has_ended
    served._launches.abort.assert_called_once()
    served._launches.remove_folders.assert_called_once()
    return side.sent


def test_a_member_whose_task_has_ended_is_lost_for_that_reason(gang):
    control, member = gang[0](), gang[1]()
    member.connect([HOST], control.listen(None, HOST), control.token, 5.0)
    member.send(TaskEnded("its task exited with code 3"))
    assert control.wait(lambda: control.heard.of(Abort), HANG_S)
    assert "Node 1 (host" in control.heard.of(Abort)[0].error.message
    assert "failed: its task exited with code 3" in control.heard.of(Abort)[0].error.message
    assert not control.heard.of(Note)


def test_a_loss_that_a_signal_handler_cut_off_is_told_again(gang):
    control = gang[0]()
    control.listen(None, HOST)
    told = []

    def lose(how):
        told.append(how)
        if len(told) == 1:
            raise KeyboardInterrupt

    control._listener.lose_supervisor = lose
    os.kill(control.pid, signal.SIGKILL)
    with pytest.raises(KeyboardInterrupt):
        control.wait(lambda: False, HANG_S)
    assert not control.wait(lambda: False, HANG_S)
    assert len(told) == 2
    assert control.is_gone


@pytest.fixture
def woken():
    """Return a list that grows when this process gets the wake signal."""
    found = []
    before = signal.signal(SIGNAL, lambda *_: found.append(True))
    yield found
    signal.signal(SIGNAL, before)


@pytest.mark.parametrize("has_parent", [True, False])
def test_a_task_is_woken_at_the_end_of_its_supervisor_although_no_process_of_ours_is_left(has_parent, gang, woken):
    control = gang[0]()
    control.listen(None, HOST)
    control.signal_end(True)
    if not has_parent:
        os.kill(control._parent.pid, signal.SIGKILL)
        eventually(lambda: not is_running(control._parent.pid))
    assert not woken
    os.kill(control.pid, signal.SIGKILL)
    assert eventually(lambda: woken == [True])
    control.look()
    assert "ended unexpectedly, as by SIGKILL" in control.gone[0]


def test_a_task_that_lets_its_supervisor_go_is_not_woken_although_a_fork_has_all_its_files(gang, woken):
    control = gang[0]()
    control.listen(None, HOST)
    control.signal_end(True)
    fork = os.fork()
    if fork == 0:
        control.signal_end(False)  # that setting is the task's
        signal.pause()
    try:
        pid = control.pid
        control.close()
        assert eventually(lambda: not is_running(pid))
        assert not woken
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_a_step_that_closes_all_files_may_have_their_numbers_for_its_own(gang):
    control = gang[0]()
    control.listen(None, HOST)
    number = control._end_signal._pipe
    os.close(number)
    own, other = os.pipe()
    os.dup2(own, number)
    control.signal_end(True)
    control._end_signal.close()
    os.write(other, b"mine")
    assert os.read(number, 4) == b"mine"
    assert not fcntl.fcntl(own, fcntl.F_GETFL) & os.O_ASYNC
    for each in (own, other, number):
        os.close(each)


def test_the_end_of_a_supervisor_is_known_before_all_its_files_are_closed(gang):
    """A process's files close one after the other, and the kernel signals at one of them."""
    control = gang[0]()
    control.listen(None, HOST)
    pid, link = control.pid, control._link
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_running(pid))
    looks = chain([False, True], repeat(True))  # at first another thread handles frames
    control._link = SimpleNamespace(look=lambda: next(looks), end=None, close=link.close, send=link.send)  # still open
    control.look()
    assert not control.gone
    control.look()
    assert "ended unexpectedly, as by SIGKILL" in control.gone[0]


def test_what_a_supervisor_says_last_is_heard_although_its_end_is_seen_first(gang, woken):
    control = gang[0]()
    control.listen(None, HOST)
    handled = control._link._handle

    def handle(frame):
        if frame[0] == "answer":
            eventually(lambda: control._end_signal.has_come)  # it ends as soon as it has answered
            control.look()  # as the handler of the signal does
        handled(frame)

    control._link._handle = handle
    control.signal_end(True)
    control.close()
    assert control._last_words is not None
    assert control.snapshot({}).error is None


def test_an_end_before_it_is_to_be_signalled_is_signalled_then(gang, woken):
    control = gang[0]()
    control.listen(None, HOST)
    control.call_if_missed(lambda: woken.append("missed"))
    pid = control.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: control._end_signal.has_come)
    control.signal_end(True)
    assert woken == ["missed"]
