"""What a supervisor does for the launches that its task asks for."""

import asyncio
import json
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from loops import InLoop, Loop
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Go, Ready
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain, to_plain
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.logs.console import BEHIND_BYTES
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.machine.inherited import inherited, umask
from metaflow_extensions.torchrun.plugins.torchrun.node.request import Request, Task
from metaflow_extensions.torchrun.plugins.torchrun.node.seat import Seat
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import launches as launching
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import output as output_module
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.launches import Launches
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.output import Output

TASK = Task({"PATH": "/bin", "G": "größe \udcff"}, "/", "/tmp", inherited(), umask(), ("stderr",))


def request_of(**more):
    spec = LaunchSpec("sh", ("-c", "true"), False, 1, 1, 0, "python3", options=(("no-python", None), ("tee", "3")))
    return Request(spec, "127.0.0.1", **{"machine": Machine(4, ("0", "1")), "task": TASK, **more})


def told(plain):
    """Return plain data as it comes over the link."""
    return json.loads(json.dumps(to_plain(plain)))


def test_a_request_is_the_same_on_the_other_side():
    request = request_of(commands=(("true",),), folders=("/a",), facts={"torch": "2.13"})
    assert from_plain(Request, told(request), "the request") == request


@pytest.fixture
def node():
    """Return a control node's launches, with what they say to the task and to the gang."""
    frames, sent = [], []

    gang = SimpleNamespace(own_address=None, send=sent.append)
    loop = Loop()
    seat = InLoop(loop, lambda: Seat(0, 1, lambda event: None, gang))
    warm, output = Mock(), Mock()
    tell = lambda *frame: frames.append(frame)  # noqa: E731
    make = lambda: Launches(tell, seat.itself, output, Mock(), (), warm)  # noqa: E731
    launches = InLoop(loop, make)
    yield SimpleNamespace(launches=launches, seat=seat, told=frames, sent=sent, warm=warm, output=output, loop=loop)
    loop.stop()


def ended(node):
    assert eventually(lambda: node.told and node.told[-1][0] == "ended")
    return node.told[-1]


def test_a_launch_that_the_task_leaves_at_once_ends(node):
    """Both words may come in one piece."""

    def run_and_leave():
        node.launches.itself.run(3, told(request_of()))
        node.launches.itself.give_up(3, None)

    node.loop.call(run_and_leave)
    assert ended(node) == ("ended", 3, {"handled": 0})


def test_the_task_hears_how_many_interruptions_its_launch_has_handled(node):
    """The first ends the launch. The second came too late for it: the task itself handles that."""

    def interrupt_twice():
        for _ in range(2):
            node.seat.itself.interrupt("its machine goes")

    node.launches.run(0, told(request_of()))
    assert eventually(lambda: node.sent)
    node.loop.call(interrupt_twice)
    assert ended(node)[2]["handled"] == 1


@pytest.mark.parametrize("warm", ["workers", "agent"])
def test_nothing_becomes_of_a_spare_that_has_imported_before_the_commands(warm, node):
    node.launches.run(0, told(request_of(warm=warm, commands=(("true",),))))
    assert eventually(lambda: ("complete",) in node.told, within_s=30)
    node.launches.complete(told(request_of(warm=warm, commands=(("true",),), facts={"torch": "new"})))
    assert eventually(lambda: isinstance(node.sent[-1], Ready))
    assert node.sent[0].prepares
    assert node.sent[-1].facts == {"torch": "new"}
    assert node.warm.close.call_count == 1
    node.launches.abort()
    node.launches.close()


def stopping_until(monkeypatch):
    """Have each launch end only after the event that this returns."""
    stopped, run = asyncio.Event(), launching.NodeLaunch.run

    async def run_and_wait(launch):
        try:
            return await run(launch)
        finally:
            await stopped.wait()

    monkeypatch.setattr(launching.NodeLaunch, "run", run_and_wait)
    return stopped


def test_a_launch_waits_for_the_end_of_one_that_is_still_being_stopped(node, monkeypatch):
    """The task may have left that by a second Ctrl-C, and its step's code may go on."""
    stopped = stopping_until(monkeypatch)
    begun = lambda: [message.launch for message in node.sent if isinstance(message, Ready)]  # noqa: E731
    node.launches.run(0, told(request_of()))
    node.launches.give_up(0, None)
    assert eventually(lambda: begun() == [0])
    node.launches.run(1, told(request_of()))
    time.sleep(0.2)  # it would have begun by now
    assert begun() == [0]
    node.loop.post(stopped.set)
    assert eventually(lambda: begun() == [0, 1])
    assert node.told[0] == ("ended", 0, {"handled": 0})
    node.launches.abort()
    node.launches.close()


def test_a_bug_of_ours_is_told_as_one(node):
    node.launches.run(0, told(request_of()))
    node.loop.post(lambda: node.seat.itself.inbox.put_nowait("no news at all"))
    assert "bug in metaflow-torchrun" in ended(node)[2]["error"]["message"]


def test_a_launch_after_the_gang_broke_does_not_begin(node):
    node.seat.lose_control("its connection was closed")
    node.launches.run(0, told(request_of()))
    assert ended(node)[2]["is_broken"]
    assert not any(isinstance(message, Go | Ready) for message in node.sent)


@pytest.mark.parametrize(("logs", "nodes_here", "is_sent"), [("all", 1, True), ("all", 2, False), ("node", 1, False)])
def test_lines_are_sent_where_the_control_node_shows_them_and_has_another_terminal(logs, nodes_here, is_sent):
    sent, output = [], Mock()
    launches = Launches(print, Mock(), output, lambda *lines: sent.append(lines), (), None)
    write = launches._writer(request_of(logs=logs, machine=Machine(4, nodes_here=nodes_here)))
    write("stdout", "größe\n".encode())
    write("stdout", b"")
    assert sent == ([("stdout", "größe\n")] if is_sent else [])
    assert output.write.call_count == 2


def test_lines_for_a_stream_of_the_steps_own_code_go_to_the_task_until_it_is_behind(monkeypatch):
    written, frames = [], []
    monkeypatch.setattr(output_module, "write_output", lambda stream, lines: written.append((stream, lines)) or True)
    output = Output(lambda *frame: frames.append(frame))
    output.begin(["stdout"])
    assert output.write("stderr", b"here\n")
    assert output.write("stdout", "größe\n".encode())
    assert frames == [("text", "stdout", "größe\n", 8)]
    assert (b"here\n" in dict(written).values(), ("stdout", b"") in written) == (True, True)
    assert not output.write("stdout", b"x" * BEHIND_BYTES)
    assert not output.write("stdout", b"")
    output.wrote(8 + BEHIND_BYTES)
    assert output.write("stdout", b"")
