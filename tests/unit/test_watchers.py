"""What features do on a node while a generation runs: what is told, and that one that fails harms nobody."""

import asyncio
import math

import pytest
from metaflow.plugins.timeout_decorator import TimeoutException

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.launch.services import InTask, starts_of
from metaflow_extensions.torchrun.plugins.torchrun.node import watchers as of_node
from metaflow_extensions.torchrun.plugins.torchrun.node.watchers import Here, Variables, Watch, Watcher, Watchers


class Counting(InTask, Watch, Watcher):
    """Parts of a feature, and its watcher, which sends how often it was polled; fails where the test wants it."""

    def __init__(self, name="counting", fails="", data=None, saw_workers_at=None, error=None):
        self.name, self.saw_workers_at = name, saw_workers_at
        self._fails, self._error = fails, error or OSError("gone")
        self._data = {"it": 1} if data is None else data
        self.polls = self.closed = 0

    def _do(self, name):
        if name == self._fails:
            raise self._error

    def starts(self, settings, machine, requested):
        self._do("starts")

    def variables(self, plan, folder):
        self._do("variables")
        return Variables({f"{self.name}_node": folder}, {f"{self.name}_rank": "${local_rank}"})

    def watcher(self, here):
        self._do("watcher")
        return self

    def poll(self):
        self._do("poll")
        self.polls += 1
        return self._data

    async def ended(self):
        self._do("ended")
        return {"polls": self.polls}

    def close(self):
        self.closed += 1
        self._do("close")


def watchers_of(*features):
    said = []
    here = Here(None, "/folder", lambda: None, lambda rank: False, said.append, said.append, dict, lambda: None, int)
    return Watchers({each.name: each for each in features}, here, 3, 4), said


@pytest.mark.parametrize("fails", ["watcher", "poll", "ended", "close"])
def test_a_feature_that_raises_is_left_out_and_a_line_says_so_once(fails):
    ill, well = Counting("ill", fails), Counting("well")
    watchers, said = watchers_of(ill, well)
    for _ in range(3):
        watchers.poll()
    told = asyncio.run(watchers.ended())
    watchers.close()
    watchers.close()
    assert Report("well", 3, 4, {"polls": 3}) in told
    assert [line.endswith("its ill: OSError: gone") for line in said] == [True]
    assert (ill.closed, well.closed) == (fails != "watcher", 1)


@pytest.mark.parametrize("error", [LaunchFailed("node 3 is lost"), TimeoutException("@timeout")])
@pytest.mark.parametrize("fails", ["watcher", "poll", "ended", "close", "starts"])
def test_what_a_signals_handler_raises_in_a_feature_reaches_the_step(fails, error):
    """As the news of a gang around this one, or Metaflow's @timeout."""
    feature = Counting("ill", fails, error=error)

    def live():
        starts_of({"ill": feature}, None, None, None)
        watchers, _ = watchers_of(feature)
        watchers.poll()
        asyncio.run(watchers.ended())
        watchers.close()

    with pytest.raises(type(error)):
        live()


@pytest.mark.parametrize("data", [{"x": "a" * of_node.MAX_TOLD_BYTES}, {"x": math.nan}, {"x": object()}])
def test_what_is_too_large_or_no_plain_data_is_not_told(data):
    watchers, said = watchers_of(Counting("ill", data=data), Counting("well"))
    assert [told.kind for told in watchers.poll()] == ["well"]
    assert len(said) == 1
    assert [told.kind for told in watchers.poll()] == ["well"]


def test_the_variables_of_all_features_are_the_workers():
    said = []
    features = {"a": Counting("a"), "ill": Counting("ill", "variables"), "b": Counting("b")}
    found = of_node.variables_of(features, None, "/logs", said.append)
    assert found == Variables(
        {"a_node": "/logs", "b_node": "/logs"}, dict.fromkeys(["a_rank", "b_rank"], "${local_rank}")
    )
    assert found.names == {"a_node", "b_node", "a_rank", "b_rank", "TORCHRUN_HOOKS"}
    assert [line.endswith("its ill: OSError: gone") for line in said] == [True]


def test_spares_are_those_of_the_feature_that_the_task_names():
    feature = Watch()
    feature.spares = lambda data: [data]
    assert of_node.spares_of({"warm": feature}, {"feature": "warm", "data": 3}) == [3]
    assert of_node.spares_of({"warm": feature}, None) is None
    assert of_node.spares_of({"other": feature}, {"feature": "warm", "data": 3}) is None
