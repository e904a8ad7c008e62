"""What a node observes while a generation runs: one observer that fails harms nobody."""

import asyncio
from types import SimpleNamespace

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.node.observers import Observer, Observers


class Counting(Observer):
    """Tells how often it was polled; fails where the test wants it."""

    def __init__(self, fails=""):
        self._fails = fails
        self.polls = self.closed = 0
        self._do("make")

    def _do(self, name):
        if name == self._fails:
            raise OSError("gone")

    def poll(self):
        self._do("poll")
        self.polls += 1

    async def ended(self):
        self._do("ended")
        return {"polls": self.polls}

    def close(self):
        self.closed += 1
        self._do("close")


@pytest.mark.parametrize("fails", ["make", "poll", "ended", "close"])
def test_an_observer_that_raises_is_left_out_and_a_line_says_so_once(fails):
    said, made = [], []

    def maker(fails):
        def make(here):
            made.append(Counting(fails))
            return made[-1]

        return make

    here = SimpleNamespace(say=said.append, go=SimpleNamespace(launch=3, generation=4))
    observers = Observers(here, {"ill": maker(fails), "well": maker("")})
    for _ in range(3):
        assert observers.poll() == []
    told = asyncio.run(observers.ended())
    observers.close()
    observers.close()
    assert Report("well", 3, 4, {"polls": 3}) in told
    assert [line.endswith("its ill: OSError: gone") for line in said] == [True]
    assert [each.closed for each in made] == ([1] if fails == "make" else [1, 1])
