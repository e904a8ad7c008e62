"""The control node looks for what commands ask, seldom, and stores the answers."""

import time
from types import SimpleNamespace

import pytest
from unit_helpers import HANG_S, Looping, eventually

from metaflow_extensions.torchrun.plugins.torchrun.records.requests import Request
from metaflow_extensions.torchrun.plugins.torchrun.task import requests
from metaflow_extensions.torchrun.plugins.torchrun.task.requests import Requests


class Store:
    """The part of `Registry` that is needed, in memory."""

    def __init__(self):
        self.request, self.answers, self.looks, self.fails = None, [], 0, 0

    def load_request(self):
        self.looks += 1
        if self.fails:
            self.fails -= 1
            raise OSError("the datastore is away")
        return self.request

    def save_answer(self, answer):
        if self.fails:
            self.fails -= 1
            raise OSError("the datastore is away")
        self.answers.append(answer)


@pytest.fixture
def looking():
    """Return a function that starts to look, with what asks the gang; the gang answers at once."""
    started, works = [], []

    def begin(name, do):
        works.append(Looping(name, do))
        return works[-1]

    def start(store, is_local=True, asks=None):
        asked, ready = asks if asks is not None else [], {}

        def ask(name, data):
            asked.append((name, data))
            ready[name] = {"id": data["id"], "found": len(asked)}

        started.append(Requests(store, ask, lambda name: ready.pop(name, None), begin, is_local, lambda: False))
        return started[-1]

    yield start
    for each in started:
        each.close()
    for each in works:
        assert each.settle(HANG_S)


def test_a_request_is_answered_once(looking):
    store, asks = Store(), []
    looking(store, asks=asks)
    store.request = Request("one", time.time(), "stacks", {"native": True})
    eventually(lambda: store.answers, "an answer")
    looks = store.looks
    eventually(lambda: store.looks > looks + 2, "more looks")
    assert asks == [("stacks", {"native": True, "id": "one"})]
    (answer,) = store.answers
    assert (answer.request.id, answer.data) == ("one", {"id": "one", "found": 1})
    store.request = Request("two", time.time(), "stacks")
    eventually(lambda: len(store.answers) == 2, "another answer")


def test_a_request_of_long_ago_is_not_answered_and_a_failing_store_ends_nothing(looking):
    store, asks = Store(), []
    store.fails = 2
    store.request = Request("old", time.time() - requests._TOO_OLD_S - 1, "stacks")
    looking(store, asks=asks)
    eventually(lambda: store.looks > 4, "more looks")
    assert asks == store.answers == []
    store.request = Request("new", time.time(), "stacks")
    eventually(lambda: asks, "a question")
    store.fails = 2
    eventually(lambda: store.answers, "an answer, though the datastore fails when it is stored")


def test_an_object_store_is_asked_twice_a_minute_and_oftener_only_after_a_request(looking):
    work = SimpleNamespace(begin=lambda: None)
    for is_on_disk, own_code, pauses in (
        (False, False, [(30.0, 30.0), (3.0, 3.0)]),
        (True, False, [(0.5, 0.5)] * 2),
        (True, True, [(0.5, 30.0)] * 2),  # a launch's begin is news
    ):
        dos, store = [], Store()
        begin = lambda _, do, dos=dos: dos.append(do) or work  # noqa: E731
        runs_own_code = lambda own_code=own_code: own_code  # noqa: E731
        Requests(store, lambda *_: None, lambda _: {"id": "one"}, begin, is_on_disk, runs_own_code)
        assert dos[0]() == pauses[0]
        store.request = Request("one", time.time(), "stacks")
        assert dos[0]() == pauses[1]
        assert (store.looks, len(store.answers)) == (2, 1)
