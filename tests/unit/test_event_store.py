"""When what is known of a gang is written into the datastore."""

import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Keeper, Keepers
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Join, Told
from metaflow_extensions.torchrun.plugins.torchrun.gang.state import Gang
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
        self.saved, self.fails = [], False

    def save_snapshot(self, snapshot, patience_s):
        self.saved.append(snapshot)
        if self.fails:
            raise GangError("the datastore fails")

    @property
    def counts(self):
        """What was stored last of what a feature keeps."""
        return self.saved[-1].features["counts"]


@pytest.fixture
def gang():
    return Gang(2, lambda port: 29500, keepers=Keepers({"counts": Counts()}))


@pytest.fixture
def store(gang, monkeypatch):
    monkeypatch.setattr(event_store, "_EVERY_S", 0.01)
    registry = FakeRegistry()
    store = EventStore(registry, gang, {})
    store.registry = registry
    yield store
    store.close()


def tell(gang, node):
    """Have a feature tell something of a node; before a launch a message would be late."""
    gang.keepers.handle(node, TOLD, 0.0)


def test_what_features_keep_is_written_with_what_has_happened_and_else_seldom(gang, store):
    saved = store.registry.saved
    gang.handle(1, Join(1, "host-1"))
    eventually(lambda: saved)
    tell(gang, 1)
    due_at = store._numbers_due_at
    for _ in range(3):
        store._save()
    assert len(saved) == 1, "for what is told alone it is too early"
    gang.handle(0, Join(0, "host-0"))
    eventually(lambda: len(saved) == 2)
    assert store.registry.counts == {"1": 1}
    assert store._numbers_due_at > due_at
    tell(gang, 1)
    store._numbers_due_at = 0.0
    eventually(lambda: len(saved) == 3)
    tell(gang, 0)
    store.close()
    assert store.registry.counts == {"0": 1, "1": 2}, "at the end all is written"
    count = len(saved)
    store.close()
    assert len(saved) == count


def test_a_datastore_that_fails_is_tried_again(gang, store):
    store.registry.fails = True
    gang.handle(1, Join(1, "host-1"))
    eventually(lambda: len(store.registry.saved) > 2)
    store.registry.fails = False
    eventually(lambda: store._written == 1)


def test_that_the_gang_has_begun_is_stored_at_once(gang, monkeypatch):
    """By it alone a task that comes in this one's place knows; without it the step's code would run again."""
    monkeypatch.setattr(event_store, "_EVERY_S", 1000.0)
    registry = FakeRegistry()
    store = EventStore(registry, gang, {})
    try:
        gang.handle(0, Join(0, "host-0"))
        eventually(lambda: registry.saved)
        gang.handle(1, Join(1, "host-1"))
        eventually(lambda: len(registry.saved[-1].events) == 2)
    finally:
        store.close()
