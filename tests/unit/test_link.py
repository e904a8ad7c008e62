"""A task and its supervisor, as two processes, and the link between them."""

import os
import random
import threading

import pytest
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.machine.packets import PACKET_BYTES, Packets, packets
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.task import join as joining


@pytest.fixture
def control():
    """Return a control node that nobody has joined."""
    control = joining.begin_gang(parse_settings(DEFAULTS, "train"), lambda event: None, {}, {}, 2, "a token")
    yield control
    control.leave()


def test_frames_of_any_length_arrive_whole_and_in_any_mixture():
    """A signal handler sends one in the midst of another's packets."""
    chance = random.Random(7)
    values = [["x" * chance.choice([0, 5, PACKET_BYTES, 3 * PACKET_BYTES]), number] for number in range(20)]
    left = [packets(number, value) for number, value in enumerate(values)]
    come, found = Packets(), []
    while left := [each for each in left if each]:
        value = come.add(chance.choice(left).pop(0))
        found += [] if value is None else [value]
    assert sorted(found, key=lambda value: value[1]) == values


def test_a_fork_of_the_task_says_and_hears_nothing(control):
    pid = os.fork()
    if pid == 0:
        try:
            control.link.send("call", 99, "close", [0.0, False, False])
            control.leave()
            control.begin_launch()
        except GangError as error:
            os._exit(3 if "was forked from the task" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert control.link.call("states")[0] == "HERE"


def test_another_thread_may_wait_while_the_steps_code_runs_and_leaves_when_that_ends(control):
    told = threading.Event()
    thread = threading.Thread(target=lambda: control.link.wait(lambda: control.is_leaving, HANG_S) and told.set())
    thread.start()
    assert eventually(lambda: control.link.waiter == thread.ident)
    control.leave()
    assert told.wait(HANG_S)


def test_a_link_that_is_read_by_nobody_holds_no_supervisor_up(control):
    """The step's own code may run for hours."""
    control.link.wait(lambda: control.link._processes, HANG_S)
    for number in range(3000):
        control.link.send("show", "note", 0, f"line {number} " + "x" * 1000, True)
    assert control.link.call("states")[0] == "HERE"
