"""The control node looks for what commands ask, seldom, and stores the answers."""

import threading
import time

import pytest
from unit_helpers import eventually

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
    started = []

    def start(store, is_local=True, asks=None):
        asked, ready = asks if asks is not None else [], {}

        def ask(name, data):
            asked.append((name, data))
            ready[name] = {"id": data["id"], "found": len(asked)}

        started.append(Requests(store, ask, lambda name: ready.pop(name, None), is_local))
        return started[-1]

    yield start
    for each in started:
        each.close()
    eventually(lambda: not [each for each in threading.enumerate() if each.name == "torchrun-requests"], "their end")


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
    store = Store()
    looking_now = looking(store, is_local=False)
    assert looking_now._pause_s() == 30.0
    looking_now._soon_until = time.monotonic() + 60.0
    assert looking_now._pause_s() == 3.0
    assert store.looks == 0
