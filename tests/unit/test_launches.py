"""What a supervisor does for the launches that its task asks for."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from loops import InLoop, Loop
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Ready
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.endings import MustEnd
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.launches import Launches
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.side import Side


def call_of(**more):
    """Return a call as plain data, as it comes over the link."""
    own = {"options": {"no-python": None}, "environ": {"PATH": "/bin"}, "cwd": "/", "tmp": "/tmp"}
    return json.loads(json.dumps(to_plain(Call("sh", ("-c", "true"), False, 1, 1, 0, "python3", **own, **more))))


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


def test_a_launch_that_waits_for_the_end_of_another_has_its_own_news(node):
    """As after a double Ctrl-C, which the step's code has caught: the first launch is still being stopped."""

    def run_leave_and_run():
        node.launches.itself.run(0, call_of())
        node.launches.itself.give_up(0, None)
        node.launches.itself.run(1, call_of())
        node.side.itself.inbox.put_nowait(MustEnd("its machine goes"))

    node.loop.call(run_leave_and_run)
    assert eventually(lambda: len(node.told) >= 2 and node.told[-1][1] == 1)
    ends = [(number, more["handled"]) for what, number, more in node.told if what == "ended"]
    assert ends == [(0, 0), (1, 1)]


def test_nothing_becomes_of_a_spare_that_has_imported_before_the_commands(node):
    node.launches.run(0, call_of(before_run=(("true",),)))
    assert eventually(lambda: ("complete",) in node.told, within_s=30)
    node.launches.complete(call_of(before_run=(("true",),), facts={"torch": "new"}))
    assert eventually(lambda: isinstance(node.sent[-1], Ready))
    assert node.sent[0].kind == "before_run"
    assert node.sent[-1].facts == {"torch": "new"}
    assert node.warm.close.call_count == 1
    node.launches.abort()
    node.launches.close()
