"""What a node observes while a generation runs: one observer that fails harms nobody."""

import asyncio
from types import SimpleNamespace

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.generation import Observers


@pytest.mark.parametrize("fails", ["make", "poll", "ask"])
def test_an_observer_that_raises_is_left_out_and_a_line_says_so_once(fails):
    def maker(fails):
        def do(name):
            if name == fails:
                raise OSError("gone")

        async def answer(data):
            do("ask")
            return data

        def make(workers):
            do("make")
            return SimpleNamespace(poll=lambda: do("poll"), ask=answer)

        return make

    said = []
    side = SimpleNamespace(say=lambda kind, text, is_detail: said.append(text))
    workers = SimpleNamespace(side=side, go=SimpleNamespace(launch=3, generation=4))
    observers = Observers(workers, {"ill": maker(fails), "well": maker("")})
    for _ in range(3):
        assert observers.poll() == []
        told = [asyncio.run(observers.ask(kind, lambda observer: observer.ask({}))) for kind in ("ill", "well")]
        assert told == [[], [Report("well", 3, 4, {})]]
    assert [line.endswith("its ill: OSError: gone") for line in said] == [True]
