"""The control node's supervisor on a local run: when it ends the tasks of nodes without which the gang goes on."""

import asyncio
import subprocess
import sys
import time

import pytest
from limits import limit_s
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Ended, Join, Leave, Ready
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import began
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.control_side import ControlSide
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.output import Output

GRACE_S = 1.5
RULES = {"started_timeout_s": 60.0, "grace_s": GRACE_S, "min_nodes": 1}


@pytest.fixture
def task():
    """A process in the place of node 1's task."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as task:
        yield task
        task.kill()


@pytest.mark.parametrize("end", ["is lost", "was told to end"])
def test_a_node_without_which_the_gang_goes_on_has_its_grace_and_ends_in_the_end(end, task):
    """Its step may catch the error and go on: the others would wait for ever."""

    async def seconds():
        side = ControlSide(lambda *told: None, Output(lambda *told: None), 2, 30.0, "token", RULES)
        gang = side.gang

        def say(*messages):
            for node, message in messages:
                side._step(gang.handle, node, message)

        side.follow([[1, task.pid, began(task.pid)]])
        say((0, Join(0, "host-0")), (1, Join(1, "host-1", task=str(task.pid))))
        say(*((node, Ready(0, 1, "x", {}, policy=LaunchPolicy(max_restarts=3))) for node in (0, 1)))
        say(*((node, Ended(0, True, 0)) for node in (0, 1)))
        begin = time.monotonic()
        if end == "is lost":
            side._step(gang.lost, 1, "silent")
        else:
            say((1, Leave("failed", Cause("terminated", 1, "host-1"))))
        assert side.states() == ["HERE", "OUT"]
        while task.poll() is None:
            await asyncio.sleep(0.02)
        return time.monotonic() - begin

    assert asyncio.run(asyncio.wait_for(seconds(), limit_s(HANG_S))) > GRACE_S - 0.1
