"""What a supervisor does for the launches that its task asks for."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from loops import InLoop, Loop
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Go, Ready
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain, to_plain
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.endings import MustEnd
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.launches import Launches
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.side import Side

TASK = {"environ": {"PATH": "/bin", "G": "größe \udcff"}, "cwd": "/", "tmp": "/tmp", "writes": ("stderr",)}


def call_of(**more):
    options = {"no-python": None, "tee": "3"}
    own = {"machine": Machine(4, ("0", "1")), "options": options, **TASK}
    return Call("sh", ("-c", "true"), False, 1, 1, 0, "python3", **{**own, **more})


def told(plain):
    """Return plain data as it comes over the link."""
    return json.loads(json.dumps(to_plain(plain)))


def test_a_call_is_the_same_on_the_other_side():
    call = call_of(before_run=(("true",),), facts={"torch": "2.13"})
    assert from_plain(Call, told(call), "the call") == call


@pytest.fixture
def node():
    """Return a control node's launches, with what they say to the task and to the gang."""
    frames, sent = [], []
    loop, warm, output = Loop(), Mock(), Mock()
    side = InLoop(loop, lambda: Side(0, 1, lambda *frame: frames.append(frame), output))
    side.itself.send = sent.append
    launches = InLoop(loop, lambda: Launches(side.itself, output, warm))
    yield SimpleNamespace(launches=launches, side=side, told=frames, sent=sent, warm=warm, output=output, loop=loop)
    loop.stop()


def ended(node):
    assert eventually(lambda: node.told and node.told[-1][0] == "ended")
    return node.told[-1]


def test_a_launch_that_the_task_leaves_at_once_ends(node):
    """Both words may come in one piece."""

    def run_and_leave():
        node.launches.itself.run(3, told(call_of()))
        node.launches.itself.give_up(3, None)

    node.loop.call(run_and_leave)
    assert ended(node) == ("ended", 3, {"handled": 0})


def test_a_launch_that_waits_for_the_end_of_another_has_its_own_news(node):
    """As after a double Ctrl-C, which the step's code has caught: the first launch is still being stopped."""

    def run_leave_and_run():
        node.launches.itself.run(0, told(call_of()))
        node.launches.itself.give_up(0, None)
        node.launches.itself.run(1, told(call_of()))
        node.side.itself.inbox.put_nowait(MustEnd("its machine goes"))

    node.loop.call(run_leave_and_run)
    assert eventually(lambda: len(node.told) >= 2 and node.told[-1][1] == 1)
    ends = [(number, more["handled"]) for what, number, more in node.told if what == "ended"]
    assert ends == [(0, 0), (1, 1)]


@pytest.mark.parametrize("warm", ["workers", "agent"])
def test_nothing_becomes_of_a_spare_that_has_imported_before_the_commands(warm, node):
    node.launches.run(0, told(call_of(warm=warm, before_run=(("true",),))))
    assert eventually(lambda: ("complete",) in node.told, within_s=30)
    node.launches.complete(told(call_of(warm=warm, before_run=(("true",),), facts={"torch": "new"})))
    assert eventually(lambda: isinstance(node.sent[-1], Ready))
    assert node.sent[0].kind == "before_run"
    assert node.sent[-1].facts == {"torch": "new"}
    assert node.warm.close.call_count == 1
    node.launches.abort()
    node.launches.close()


def test_a_bug_of_ours_is_told_as_one(node):
    node.launches.run(0, told(call_of()))
    node.loop.post(lambda: node.side.itself.inbox.put_nowait(Go(0, 0, None, "gang", 0, group=1)))
    assert "bug in metaflow-torchrun" in ended(node)[2]["error"]["message"]
