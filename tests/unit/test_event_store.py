"""When what is known of a gang is written into the datastore."""

import json
import math

import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.border import event_store
from metaflow_extensions.torchrun.plugins.torchrun.border.event_store import EventStore
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.gang.progress import Pace, Point
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Join, Metrics, Usage
from metaflow_extensions.torchrun.plugins.torchrun.gang.state import Gang

USED = Usage("container", {"cpus": 2.5}, {"cpus": 8.0})


class FakeRegistry:
    def __init__(self):
        self.saved, self.fails = [], False

    def save_events(self, events, patience_s):
        self.saved.append(events)
        if self.fails:
            raise GangError("the datastore fails")

    @property
    def cpus(self):
        """What was stored last of each node."""
        return {node: series["cpus"] for node, series in self.saved[-1]["usage"]["nodes"].items()}


@pytest.fixture
def gang():
    return Gang(2, lambda port: 29500)


@pytest.fixture
def store(gang, monkeypatch):
    monkeypatch.setattr(event_store, "_EVERY_S", 0.01)
    registry = FakeRegistry()
    store = EventStore(registry, gang, {})
    store.registry = registry
    yield store
    store.close()


def test_what_the_nodes_use_is_written_with_what_has_happened_and_else_seldom(gang, store):
    saved = store.registry.saved
    gang.handle(1, Join(1, "host-1"))
    eventually(lambda: saved)
    gang.handle(1, USED)
    due_at = store._numbers_due_at
    for _ in range(3):
        store._save()
    assert len(saved) == 1, "for what is used alone it is too early"
    gang.handle(0, Join(0, "host-0"))
    eventually(lambda: len(saved) == 2)
    assert store.registry.cpus == {"1": [2.5]}
    assert store._numbers_due_at > due_at
    gang.handle(1, USED)
    store._numbers_due_at = 0.0
    eventually(lambda: len(saved) == 3)
    gang.handle(0, USED)
    store.close()
    assert store.registry.cpus == {"0": [2.5], "1": [2.5]}, "at the end all is written"
    count = len(saved)
    store.close()
    assert len(saved) == count


def test_what_scripts_tell_is_written_as_seldom(gang, store):
    gang.handle(1, Join(1, "host-1"))
    eventually(lambda: store.registry.saved)
    gang.progress.take(0, Metrics(0, 0, {}, (Point(7, {"loss": 2.0}),)), 0.0)
    store._save()
    assert [each["progress"] for each in store.registry.saved] == [None], "for numbers alone it is too early"
    store._numbers_due_at = 0.0
    eventually(lambda: len(store.registry.saved) == 2)
    assert store.registry.saved[-1]["progress"]["series"] == {"loss": [(7, 2.0)]}


def test_no_number_is_stored_that_only_python_can_read(gang, store):
    gang.progress.take(0, Metrics(0, 0, {0: Pace(7, math.inf)}, (Point(7, {"loss": math.inf, "lr": math.nan}),)), 0.0)
    json.dumps(store.content(), allow_nan=False)
    gang.progress.look(5.0)
    json.dumps(store.content(), allow_nan=False)


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
        eventually(lambda: len(registry.saved[-1]["events"]) == 2)
    finally:
        store.close()
