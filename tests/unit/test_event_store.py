"""When what is known of a gang is written into the datastore."""

import pytest
from unit_helpers import Looping, eventually

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Keeper, Keepers
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Join, Told
from metaflow_extensions.torchrun.plugins.torchrun.gang.state import Gang
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import snapshot_of
from metaflow_extensions.torchrun.plugins.torchrun.task import event_store
from metaflow_extensions.torchrun.plugins.torchrun.task.event_store import EventStore

TOLD = Told(0, 0, "counts", {"more": 1})


class Counts(Keeper):
    """Keeps how often each node has told anything."""

    def __init__(self):
        self.by_node = {}

    def handle(self, node, told, at_s):
        self.by_node[str(node)] = self.by_node.get(str(node), 0) + told.data["more"]

    def record(self):
        return dict(self.by_node)


class FakeRegistry:
    def __init__(self):
        self.saved, self.fails, self.failures = [], False, 0

    def save_snapshot(self, snapshot, patience_s):
        if self.fails:
            self.failures += 1
            raise GangError("the datastore fails")
        self.saved.append(snapshot)

    @property
    def counts(self):
        """What was stored last of what a feature keeps."""
        return self.saved[-1].features["counts"]


@pytest.fixture
def gang():
    return Gang(2, lambda port: 29500, keepers=Keepers({"counts": Counts()}))


class Seen:
    """The gang as its control node's task sees it, without a process between."""

    def __init__(self, gang):
        self._gang = gang

    in_background = staticmethod(Looping)

    def counts(self):
        return self._gang.history.count, self._gang.keepers.count, self._gang.keepers.heard

    def snapshot(self, about):
        return snapshot_of(self._gang)


@pytest.fixture
def begin(gang, monkeypatch):
    """Return a function that begins to store what happens to the gang, and returns the store and the registry."""
    stores = []

    def begun(every_s=0.01, numbers_every_s=1000.0):
        monkeypatch.setattr(event_store, "_EVERY_S", every_s)
        monkeypatch.setattr(event_store, "_NUMBERS_EVERY_S", numbers_every_s)
        registry = FakeRegistry()
        stores.append(EventStore(registry, Seen(gang), {}))
        return stores[-1], registry

    yield begun
    for store in stores:
        store.close()


def tell(gang, node):
    """Have a feature tell something of a node; before a launch a message would be late."""
    gang.keepers.handle(node, TOLD, 0.0)


def test_what_features_keep_is_written_with_what_has_happened_and_at_the_end(gang, begin):
    store, registry = begin()
    gang.handle(1, Join(1, "host-1"))
    eventually(lambda: registry.saved)
    tell(gang, 1)  # for that alone it is too early
    store.save_soon()
    gang.handle(0, Join(0, "host-0"))
    eventually(lambda: len(registry.saved) == 2)
    assert registry.counts == {"1": 1}
    tell(gang, 0)
    store.close()
    store.close()
    assert (registry.counts, len(registry.saved)) == ({"0": 1, "1": 1}, 3)


def test_what_features_keep_is_written_alone_when_it_is_due(gang, begin):
    _, registry = begin(numbers_every_s=0.05)
    gang.handle(1, Join(1, "host-1"))
    eventually(lambda: registry.saved)
    tell(gang, 1)
    eventually(lambda: registry.counts == {"1": 1})


def test_a_record_does_not_wait_until_numbers_are_due(gang, begin):
    store, registry = begin(every_s=0.02)
    for node in (0, 1):
        gang.handle(node, Join(node, f"host-{node}"))
    eventually(lambda: registry.saved and len(registry.saved[-1].events) == 2)
    tell(gang, 1)
    before = len(store._work.pauses)
    eventually(lambda: len(store._work.pauses) > before + 2)
    if_news, in_any_case = store._work.pauses[-1]
    assert if_news <= 0.02 < 900 < in_any_case


def test_a_datastore_that_fails_is_tried_again(gang, begin):
    store, registry = begin()
    registry.fails = True
    gang.handle(1, Join(1, "host-1"))
    eventually(lambda: registry.failures > 2)
    registry.fails = False
    eventually(lambda: len(registry.saved) == 1)
    gang.handle(0, Join(0, "host-0"))
    eventually(lambda: len(registry.saved) == 2)
    store.close()
    assert len(registry.saved) == 2, "what is stored is not stored again"


def test_that_the_gang_has_begun_is_stored_at_once(gang, begin):
    """By it alone a task that comes in this one's place knows; without it the step's code would run again."""
    _, registry = begin(every_s=1000.0)
    gang.handle(0, Join(0, "host-0"))
    eventually(lambda: registry.saved)
    gang.handle(1, Join(1, "host-1"))
    eventually(lambda: len(registry.saved[-1].events) == 2)
