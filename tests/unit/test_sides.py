"""The control node's supervisor on a local run: when it ends the tasks of nodes without which the gang goes on."""

import asyncio
import subprocess
import sys
import time

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.nodes import NodeState
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Ended, Join, Leave, Ready
from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import began
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.sides import ControlSide

GRACE_S = 1.5
RULES = {"started_timeout_s": 60.0, "grace_s": GRACE_S, "replacements": 1}


@pytest.fixture
def tasks():
    """Return a function that starts a process in a task's place."""
    started = []

    def start():
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


class Side:
    """A control node's side with one other node, whose tasks the test starts."""

    def __init__(self, start):
        self.side = ControlSide(lambda *told: None, lambda event: None, 2, 30.0, "token", RULES)
        self.gang, self._start, self.number = self.side._gang, start, 0
        self.say(0, Join(0, "host-0"))

    def say(self, node, *messages):
        for message in messages:
            self.side._channel._step(self.gang.handle, node, message)

    def start(self, is_replacement):
        task = self._start()
        self.side.follow([[1, task.pid, began(task.pid)]], is_replacement)
        self.say(1, Join(1, "host-1", task=str(task.pid)))
        return task

    def launch(self):
        """Run a launch to its end, which the newest task hears of, too."""
        policy = LaunchPolicy(max_restarts=3)
        self.say(0, Ready(self.number, 1, "x", {}, policy=policy))
        self.say(1, *(Ready(number, 1, "x", {}) for number in range(self.number + 1)))
        for node in (0, 1):
            self.say(node, Ended(self.number, True, 0))
        self.number += 1

    async def lose(self, task):
        """Lose node 1, whose task goes on; return the seconds until it is killed."""
        begin = time.monotonic()
        self.side._channel._step(self.gang.lost, 1, "silent")
        assert self.gang.nodes[1] is NodeState.AWAITED
        while task.poll() is None:
            await asyncio.sleep(0.02)
        return time.monotonic() - begin

    async def vacancy(self):
        while not self.side.nodes_to_start():
            await asyncio.sleep(0.02)


def test_each_task_has_its_grace_however_the_one_before_it_ended(tasks):
    async def lose_three_times():
        side = Side(tasks)
        seconds = [await side.lose(side.start(False))]
        await side.vacancy()
        gone = side.start(True)
        side.launch()
        gone.kill()
        side.side._channel._step(side.gang.lost, 1, "killed")
        await side.vacancy()
        third = side.start(True)
        side.launch()
        await asyncio.sleep(GRACE_S + 0.5)
        seconds.append(await side.lose(third))
        side.side._looking.cancel()
        return seconds

    assert min(asyncio.run(lose_three_times())) > GRACE_S - 0.1


def test_a_node_that_was_told_to_end_ends_in_the_end(tasks):
    """Its step may catch the error and go on: the others, and another task, would wait for ever."""

    async def tell():
        side = Side(tasks)
        task = side.start(False)
        side.launch()
        side.say(1, Leave(Cause("terminated", 1, "host-1")))
        assert side.gang.nodes[1] is NodeState.AWAITED
        while task.poll() is None:
            await asyncio.sleep(0.02)
        side.side._looking.cancel()

    asyncio.run(asyncio.wait_for(tell(), 60.0))
