"""A task and its supervisor, as two processes, the link between them, and what the control node's task stores."""

import os
import random
import signal
import threading
import time

import pytest
from test_registry import FlowDatastore, registry_of
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Leave
from metaflow_extensions.torchrun.plugins.torchrun.machine.packets import MOST_BYTES, Packets, packets
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.task import gang_store
from metaflow_extensions.torchrun.plugins.torchrun.task.cards import Cards
from metaflow_extensions.torchrun.plugins.torchrun.task.gang_store import GangStore
from metaflow_extensions.torchrun.plugins.torchrun.task.join import begin_gang


@pytest.fixture
def control():
    """Return a control node that nobody has joined."""
    control = begin_gang(parse_settings(DEFAULTS, "train"))
    yield control
    control.leave()


def supervisor_of(control):
    """Return the pid of the supervisor, once it runs."""
    control.link.wait(lambda: control.link._processes, HANG_S)
    return control.link._processes[0].pid


def test_frames_of_any_length_arrive_whole_and_in_any_mixture():
    """A signal handler sends one in the midst of another's packets."""
    chance = random.Random(7)
    values = [["x" * chance.choice([0, 5, MOST_BYTES, 3 * MOST_BYTES]), number] for number in range(20)]
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


def test_a_link_that_is_read_by_nobody_holds_no_supervisor_up(control):
    """The step's own code may run for hours."""
    supervisor_of(control)
    for number in range(3000):
        control.link.send("show", "note", 0, f"line {number} " + "x" * 1000, True)
    assert control.link.call("states")[0] == "HERE"


# --- what the control node's task stores ------------------------------------------------------------


class Hanging(FlowDatastore):
    """A datastore that does not answer until `goes_on` is set."""

    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()

    def ask(self):
        self.goes_on.wait(HANG_S)
        super().ask()


@pytest.fixture
def store(control):
    """Return what stores what is known of the gang, with its `flow` and its `registry`."""
    flow = Hanging()
    store = GangStore(control, ["7/train/3"], Cards(None), registry := registry_of(flow))
    store.flow, store.registry = flow, registry
    yield store
    flow.goes_on.set()


def test_a_job_that_hangs_is_given_up_and_another_waits_for_its_end(control, store, monkeypatch):
    monkeypatch.setattr(gang_store, "_PATIENCE_S", 0.2)
    supervisor_of(control)  # it runs
    begun = time.monotonic()
    for _ in range(2):
        store.store_now()
    assert time.monotonic() - begun < 10
    store.flow.goes_on.set()
    assert eventually(lambda: store.registry.load_view() is not None)
    control.send(Leave("done"))
    store.store_now()
    assert store.registry.load_view().nodes[0].state == "storing"


def test_a_supervisor_that_is_gone_is_the_gangs_end(control, store):
    store.flow.goes_on.set()
    store.store_now()
    assert store.registry.load_view().nodes[0].task == "7/train/3"
    pid = supervisor_of(control)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LaunchFailed):
        control.link.wait(lambda: False, HANG_S)
    store.close()
    stored = store.registry.load_view()
    assert (stored.outcome, f"pid {pid}" in stored.error, stored.nodes[0].state) == ("failed", True, "lost")
