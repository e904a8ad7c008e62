"""What the control node stores, shows and answers while our code waits, and that nothing of it keeps the gang."""

import threading
import time
from types import SimpleNamespace

import pytest
from fake_link import FakeLink, member_of
from metaflow_extensions.torchrun.plugins.torchrun.gang.history import Record
from metaflow_extensions.torchrun.plugins.torchrun.records.requests import Request
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import Snapshot
from test_registry import FlowDatastore, registry_of
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun.gang.view import Presence
from metaflow_extensions.torchrun.plugins.torchrun.task import gang_store
from metaflow_extensions.torchrun.plugins.torchrun.task.gang_store import GangStore


class Link(FakeLink):
    """A link to a supervisor that knows some records, and answers at once; `asked` is what it was asked."""

    def __init__(self):
        super().__init__()
        self.records, self.numbers, self.asked, self._answers = 0, 0, [], {}

    def snapshot(self):
        records = [Record("joined", 1.0 * at, time.time() + at, node=at % 2, text="vm") for at in range(self.records)]
        return Snapshot(2, 1, events=tuple(records)).stored()

    def ask(self, name, *args):
        self.asked.append((name, *args))
        number = len(self.asked)
        self._answers[number] = getattr(self, f"on_{name}")(*args)
        return number

    def on_news(self, known, with_numbers):
        counts = [self.records, 0, self.numbers]
        is_new = counts[:2] != known[:2] or (with_numbers and counts != known)
        return {"counts": counts, "snapshot": self.snapshot() if is_new else None}

    def on_request(self, feature, data):
        return {"id": data["id"], "feature": feature}

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
    store = GangStore(member, {"command": "torchrun x"}, cards, registry, is_on_disk=True)
    yield SimpleNamespace(link=link, cards=cards, registry=registry, member=member, store=store)
    member.leave()


def test_news_is_stored_and_shown_while_our_code_waits_and_by_one_thread_at_a_time(gang):
    before = threading.active_count()
    gang.link.records = 2
    assert gang.link.wait(lambda: gang.cards.renewed and not gang.member.has_job, HANG_S)
    stored = gang.registry.load_snapshot()
    assert ([event.kind for event in stored.events], stored.command) == (["joined", "joined"], "torchrun x")
    assert gang.cards.renewed[0].now_s is not None
    assert gang.store.in_state(Presence.GONE) == [1]
    assert threading.active_count() <= before + 1
    gang.link.records = 3
    time.sleep(0.05)
    assert len(gang.registry.load_snapshot().events) == 2, "nothing is done while the step's own code runs"


def test_what_is_known_when_a_launch_ends_is_stored_then(gang):
    gang.link.records = 1
    gang.store.store_now()
    gang.link.records, gang.link.numbers = 2, 7
    gang.store.store_now()
    assert len(gang.registry.load_snapshot().events) == 2


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
    gang.link.records, gang.member.uploads = 2, True
    gang.link.wait(lambda: False, 0.1)
    assert gang.link.asked == []
    gang.member.uploads = False
    gang.store.store_now()
    assert gang.registry.load_snapshot() is not None


def test_a_job_that_hangs_is_given_up_and_another_waits_for_its_end(gang, monkeypatch):
    monkeypatch.setattr(gang_store, "_PATIENCE_S", 0.2)
    gang.cards.hang = threading.Event()
    gang.link.records = 2
    begun = time.monotonic()
    gang.store.store_now()
    gang.link.records = 3
    gang.store.store_now()
    assert time.monotonic() - begun < 10
    assert gang.cards.renewed == []
    gang.cards.hang.set()
    assert eventually(lambda: gang.cards.renewed)
    gang.store.store_now()
    assert len(gang.registry.load_snapshot().events) == 3


def test_an_order_to_end_does_not_wait_for_a_datastore(gang):
    gang.cards.hang = threading.Event()
    gang.link.records = 2
    gang.member.interrupt()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        gang.store.store_now()
    gang.store.store_now()
    assert time.monotonic() - begun < 1
    gang.cards.hang.set()


def test_a_request_is_answered_once(gang):
    gang.registry.save_request(Request("r1", time.time(), "stacks", {"rank": 3}))
    assert gang.link.wait(gang.registry.load_answer, HANG_S)
    answer = gang.registry.load_answer()
    assert (answer.request.id, answer.data) == ("r1", {"id": "r1", "feature": "stacks"})
    gang.link.wait(lambda: False, 1.0)
    assert [name for name, *_ in gang.link.asked].count("request") == 1


def test_a_request_of_long_ago_is_not_answered(gang):
    gang.registry.save_request(Request("r1", time.time() - 3600.0, "stacks"))
    gang.link.wait(lambda: False, 1.0)
    assert gang.registry.load_answer() is None


def test_the_gangs_last_words_are_stored_when_the_link_is_closed(gang):
    gang.link.records = 2
    gang.link.last_words = {"view": {"states": ["GONE", "GONE"], "broken": None}, "snapshot": gang.link.snapshot()}
    gang.link.end = "its gang has ended"
    gang.store.close()
    stored = gang.registry.load_snapshot()
    assert (len(stored.events), stored.now_s) == (2, None)
    assert gang.store.states()[1] is Presence.GONE


def test_a_supervisor_that_is_gone_is_the_gangs_end(gang):
    gang.link.records = 2
    gang.store.store_now()
    gang.link.end = "its supervisor process (pid 7) ended unexpectedly"
    gang.store.close()
    assert "pid 7" in gang.registry.load_snapshot().error
