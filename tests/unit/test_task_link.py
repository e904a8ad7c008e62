"""The supervisor's end of the link: it wakes a task whose own code runs, and no other signals reach that."""

import asyncio
import os
import signal
import socket
import time

import pytest
from limits import limit_s
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.machine.packets import Packets
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.task_link import TaskLink


@pytest.fixture
def woken():
    """Return when this process, which stands for the task, was woken."""
    times = []
    before = signal.signal(signal.SIGURG, lambda *_: times.append(time.monotonic()))
    yield times
    signal.signal(signal.SIGURG, before)


@pytest.fixture
def task():
    """Return the task's end of a link, and a function that has its supervisor do something with the other one."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def have(do, until, within_s=HANG_S):
        async def run():
            link = TaskLink(theirs, os.getpid(), lambda frame: None)
            link.open()
            do(link)
            deadline = time.monotonic() + limit_s(within_s)
            while not until() and time.monotonic() < deadline:
                await asyncio.sleep(0.01)

        asyncio.run(run())
        return until()

    with own, theirs:
        yield own, have


def test_a_task_is_woken_until_it_has_read_what_is_urgent(task, woken):
    own, have = task
    assert have(lambda link: link.send_now("lost", "why"), lambda: len(woken) > 3)

    def read_after_two():
        if len(woken) >= 2 and not heard:
            heard.append(own.recv(100))
            before.append(len(woken))
        return False

    heard, before = [], []
    woken.clear()
    own.recv(100)
    have(lambda link: link.send_now("must_end", "why"), read_after_two, within_s=0.5)
    assert Packets().add(heard[0]) == ["must_end", "why"]
    assert len(woken) <= before[0] + 1, "one more may have been on its way"
