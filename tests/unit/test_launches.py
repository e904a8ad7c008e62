"""What a supervisor does for the launches that its task asks for."""

import json
from unittest.mock import Mock

from loops import InLoop, Loop
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Ready
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.launches import Launches
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.side import Side


def call_of(**more):
    """Return a call as plain data, as it comes over the link."""
    own = {"options": {"no-python": None}, "environ": {"PATH": "/bin"}, "before_run": (("true",),)}
    return json.loads(json.dumps(to_plain(Call("sh", ("-c", "true"), False, 1, 1, 0, "python3", **own, **more))))


def test_nothing_becomes_of_a_spare_that_has_imported_before_the_commands():
    told, sent, loop, warm, output = [], [], Loop(), Mock(), Mock()
    side = InLoop(loop, lambda: Side(0, 1, lambda *frame: told.append(frame), output))
    side.itself.send = sent.append
    launches = InLoop(loop, lambda: Launches(side.itself, output, warm))
    launches.run(0, call_of(cwd="/", tmp="/tmp"))
    assert eventually(lambda: ("complete",) in told, within_s=30)
    launches.complete(call_of(facts={"torch": "new"}))
    assert eventually(lambda: isinstance(sent[-1], Ready))
    assert (sent[0].kind, sent[-1].facts, warm.close.call_count) == ("before_run", {"torch": "new"}, 1)
    launches.abort()
    launches.close()
    loop.stop()
