"""What the control node stores, shows and answers while our code waits, and that nothing of it keeps the gang."""

import threading
import time
from types import SimpleNamespace

import pytest
from fake_link import FakeLink, member_of
from gang_views import Story
from test_registry import FlowDatastore, registry_of
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun.channel.registry import Request
from metaflow_extensions.torchrun.plugins.torchrun.gang.gang import Presence
from metaflow_extensions.torchrun.plugins.torchrun.task import gang_store
from metaflow_extensions.torchrun.plugins.torchrun.task.gang_store import GangStore


class Link(FakeLink):
    """A link to a supervisor whose gang has lived so far, and which answers at once; `asked` is what it was asked."""

    def __init__(self):
        super().__init__()
        self.story, self.asked, self._answers = Story(), [], {}

    def view(self):
        return self.story.gang.view.stored()

    def ask(self, name, *args):
        self.asked.append((name, *args))
        number = len(self.asked)
        self._answers[number] = getattr(self, f"on_{name}")(*args)
        return number

    def on_news(self, known, with_numbers):
        counts = [self.story.gang.changes, self.story.gang.numbers]
        is_new = counts[0] != known[0] or (with_numbers and counts != known)
        return {"counts": counts, "view": self.view() if is_new else None}

    def on_request(self, asked, kind):
        return {"id": asked, "kind": kind}

    def has_answer(self, number):
        return number in self._answers

    def pop_answer(self, number):
        return self._answers.pop(number)

    def call(self, name, *args):
        return {"states": ["HERE", "GONE"], "broken": None}

    def gone(self, why=""):
        return RuntimeError(self.end)


class Cards:
    """Cards that are only counted."""

    def __init__(self, are_wanted=True):
        self.renewed, self.shown, self.hang, self.are_wanted = [], None, None, are_wanted

    def renew(self):
        if self.hang is not None:
            self.hang.wait(HANG_S)
        self.renewed.append(self.shown())


@pytest.fixture
def gang():
    link, cards = Link(), Cards()
    registry = registry_of(FlowDatastore())
    member = member_of(link, node=0)
    store = GangStore(member, {"command": "torchrun x", "tasks": ["7/train/3"]}, cards, registry, is_on_disk=True)
    yield SimpleNamespace(link=link, cards=cards, registry=registry, member=member, store=store)
    member.leave()


def test_news_is_stored_and_shown_while_our_code_waits_and_by_one_thread_at_a_time(gang):
    before = threading.active_count()
    gang.link.story.joined().ready(0)
    assert gang.link.wait(lambda: gang.cards.renewed and not gang.member.has_job, HANG_S)
    stored = gang.registry.load_view()
    assert ([event.kind for event in stored.events], stored.command) == (["joined", "ready"], "torchrun x")
    assert [node.task for node in stored.nodes] == ["7/train/3", None]
    assert gang.cards.renewed[0].events == stored.events
    assert gang.store.in_state(Presence.GONE) == [1]
    assert threading.active_count() <= before + 1
    gang.link.story.lost(1)
    time.sleep(0.05)
    assert len(gang.registry.load_view().events) == 2, "nothing is done while the step's own code runs"


def test_what_is_known_when_a_launch_ends_is_stored_then(gang):
    gang.link.story.running()
    gang.store.store_now()
    gang.link.story.report("usage", of="container", values={"cpus": 2.0}, limits={})
    gang.store.store_now()
    assert gang.registry.load_view().usage[0]["last"] == {"cpus": 2.0}, "also if only numbers have changed"


def test_a_gang_that_nobody_shows_or_stores_keeps_no_launch_waiting():
    """As a `TorchrunSingleNodeMultiGPU` without a card."""
    link = Link()
    member = member_of(link, node=0, num_nodes=1)
    store = GangStore(member, {}, Cards(are_wanted=False), None)
    begun = time.monotonic()
    store.store_now()
    assert time.monotonic() - begun < 1
    link.wait(lambda: False, 0.1)
    assert link.asked == []


def test_values_and_outputs_come_first(gang):
    gang.link.story.joined()
    gang.member.uploads = True
    gang.link.wait(lambda: False, 0.1)
    assert gang.link.asked == []
    gang.member.uploads = False
    gang.store.store_now()
    assert gang.registry.load_view() is not None


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


def test_a_request_is_answered_once(gang):
    gang.registry.save_request(Request("r1", time.time(), "stacks"))
    assert gang.link.wait(gang.registry.load_answer, HANG_S)
    answer = gang.registry.load_answer()
    assert (answer.request.id, answer.data) == ("r1", {"id": "r1", "kind": "stacks"})
    gang.link.wait(lambda: False, 1.0)
    assert [name for name, *_ in gang.link.asked].count("request") == 1


def test_a_request_of_long_ago_is_not_answered(gang):
    gang.registry.save_request(Request("r1", time.time() - 3600.0, "stacks"))
    gang.link.wait(lambda: False, 1.0)
    assert gang.registry.load_answer() is None


def test_the_gangs_last_words_are_stored_when_the_link_is_closed(gang):
    gang.link.story.joined().done().left()
    gang.link.last_words = {"states": {"states": ["GONE", "GONE"], "broken": None}, "view": gang.link.view()}
    gang.link.end = "its gang has ended"
    gang.store.close()
    stored = gang.registry.load_view()
    assert (stored.is_over, stored.error, gang.store.in_state(Presence.GONE)) == (True, None, [1])
    assert gang.store.present() == stored, "its time stands still"


def test_a_supervisor_that_is_gone_is_the_gangs_end(gang):
    gang.link.story.joined()
    gang.store.store_now()
    gang.link.end = "its supervisor process (pid 7) ended unexpectedly"
    gang.store.close()
    stored = gang.registry.load_view()
    assert (stored.outcome, "pid 7" in stored.error, stored.nodes[0].state) == ("failed", True, "lost")
