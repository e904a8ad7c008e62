"""What the control node stores while our code waits, and that nothing of it keeps the gang. The supervisor is real."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from fake_link import supervisor_of
from test_registry import FlowDatastore, registry_of
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Leave
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.task import gang_store
from metaflow_extensions.torchrun.plugins.torchrun.task.cards import Cards
from metaflow_extensions.torchrun.plugins.torchrun.task.gang_store import GangStore
from metaflow_extensions.torchrun.plugins.torchrun.task.join import begin_gang


class Hanging(FlowDatastore):
    """A datastore that does not answer until `goes_on` is set."""

    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()

    def ask(self):
        self.goes_on.wait(HANG_S)
        super().ask()


@pytest.fixture
def gang():
    flow = Hanging()
    registry, member = registry_of(flow), begin_gang(parse_settings(DEFAULTS, "train"), lambda event: None)
    store = GangStore(member, ["7/train/3"], Cards(None), registry)
    yield SimpleNamespace(goes_on=flow.goes_on, registry=registry, member=member, store=store)
    flow.goes_on.set()
    member.leave()


def test_a_job_that_hangs_is_given_up_and_another_waits_for_its_end(gang, monkeypatch):
    monkeypatch.setattr(gang_store, "_PATIENCE_S", 0.2)
    supervisor_of(gang.member.link)  # it runs
    begun = time.monotonic()
    for _ in range(2):
        gang.store.store_now()
    assert time.monotonic() - begun < 10
    gang.goes_on.set()
    assert eventually(lambda: gang.registry.load_view() is not None)
    gang.member.send(Leave("done"))
    gang.store.store_now()
    assert gang.registry.load_view().nodes[0].state == "storing"


def test_a_supervisor_that_is_gone_is_the_gangs_end(gang):
    gang.goes_on.set()
    gang.store.store_now()
    assert gang.registry.load_view().nodes[0].task == "7/train/3"
    pid = supervisor_of(gang.member.link)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LaunchFailed):
        gang.member.link.wait(lambda: False, HANG_S)
    gang.store.close()
    stored = gang.registry.load_view()
    assert (stored.outcome, f"pid {pid}" in stored.error, stored.nodes[0].state) == ("failed", True, "lost")
