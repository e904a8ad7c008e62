"""What the control node stores, shows and answers while our code waits, and that nothing of it keeps the gang."""

import threading
import time
from types import SimpleNamespace

import pytest
from fake_link import FakeLink, member_of
from gang_views import Story
from test_registry import FlowDatastore, registry_of
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun.task import gang_store
from metaflow_extensions.torchrun.plugins.torchrun.task.gang_store import GangStore


class Link(FakeLink):
    """A link to a supervisor whose gang has lived so far, and which answers at once."""

    def __init__(self):
        super().__init__()
        self.story, self._answers = Story(), {}

    def view(self):
        return self.story.state.view.stored()

    def ask(self, name, *args):
        number = len(self._answers)
        self._answers[number] = getattr(self, f"on_{name}")(*args)
        return number

    def on_news(self, known, with_numbers):
        counts = [self.story.state.changes, self.story.state.numbers]
        is_new = counts[0] != known[0] or (with_numbers and counts != known)
        return {"counts": counts, "view": self.view() if is_new else None}

    def on_request(self, asked, kind):
        return {"id": asked, "kind": kind}

    def has_answer(self, number):
        return number in self._answers

    def pop_answer(self, number):
        return self._answers[number]

    def call(self, name, *args):
        return {"states": ["HERE", "GONE"], "broken": None}

    def gone(self, why=""):
        return RuntimeError(self.end)


class Cards:
    """Cards that are only counted."""

    def __init__(self):
        self.renewed, self.shown, self.hang, self.are_wanted = [], None, None, True

    def renew(self):
        if self.hang is not None:
            self.hang.wait(HANG_S)
        self.renewed.append(self.shown())


@pytest.fixture
def gang():
    link, cards = Link(), Cards()
    registry = registry_of(FlowDatastore())
    member = member_of(link, node=0)
    store = GangStore(member, ["7/train/3"], cards, registry)
    yield SimpleNamespace(link=link, cards=cards, registry=registry, member=member, store=store)
    member.leave()


def test_what_is_known_when_a_launch_ends_is_stored_then(gang):
    gang.link.story.running()
    gang.store.store_now()
    gang.link.story.report("usage", of="container", values={"cpus": 2.0}, limits={})
    gang.store.store_now()
    assert gang.registry.load_view().usage[0]["last"] == {"cpus": 2.0}, "also if only numbers have changed"


def test_a_job_that_hangs_is_given_up_and_another_waits_for_its_end(gang, monkeypatch):
    monkeypatch.setattr(gang_store, "_PATIENCE_S", 0.2)
    gang.cards.hang = threading.Event()
    gang.link.story.joined()
    begun = time.monotonic()
    gang.store.store_now()
    gang.link.story.ready()
    gang.store.store_now()
    assert time.monotonic() - begun < 10
    assert gang.cards.renewed == []
    gang.cards.hang.set()
    assert eventually(lambda: gang.cards.renewed)
    gang.store.store_now()
    assert gang.registry.load_view().outcome == "starting"


def test_an_order_to_end_does_not_wait_for_a_datastore(gang):
    gang.cards.hang = threading.Event()
    gang.link.story.joined()
    gang.member.interrupt()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        gang.store.store_now()
    gang.store.store_now()
    assert time.monotonic() - begun < 1
    gang.cards.hang.set()


def test_a_supervisor_that_is_gone_is_the_gangs_end(gang):
    gang.link.story.joined()
    gang.store.store_now()
    gang.link.end = "its supervisor process (pid 7) ended unexpectedly"
    gang.store.close()
    stored = gang.registry.load_view()
    assert (stored.outcome, "pid 7" in stored.error, stored.nodes[0].state) == ("failed", True, "lost")
