"""A function's call on one node, and what the control node keeps of it."""

import pickle
from contextlib import closing
from pathlib import Path

import pytest
from fake_node import ERROR, FakeNode
from unit_helpers import MemoryStore

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.features.functions.call import FunctionCall
from metaflow_extensions.torchrun.plugins.torchrun.features.functions.feature import FunctionKeeper
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Keepers
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import (
    Ended,
    Failed,
    Stored,
    Storing,
    Told,
)
from metaflow_extensions.torchrun.plugins.torchrun.guardian.agent_events import End
from metaflow_extensions.torchrun.plugins.torchrun.node.services import Services


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def call(store):
    with closing(FunctionCall(print, None, None, True, store)) as call:
        yield call


def node_of(folder, number, call, store):
    return FakeNode(folder, number=number, services=Services({"functions": call}), store=store)


def leaves(call, *ranks, name="returned"):
    for rank in ranks:
        Path(call.folder, "values", f"{name}-{rank}.pkl").write_bytes(pickle.dumps(f"of rank {rank}"))


def told_by(node):
    told = {}
    while not isinstance(message := node.next_message(), Stored):
        assert isinstance(message, Storing | Told)
        told |= message.data if isinstance(message, Told) else {}
    return told


def test_a_members_values_go_to_the_control_node(tmp_path, call, store):
    node = node_of(tmp_path, 1, call, store)
    agent = node.running()
    assert list(agent.options.scratch) == [call.folder]
    leaves(call, 2, 3)
    node.all_end_well(agent)
    ended = node.expect(Ended)
    assert ended.storing.startswith("rank 2's value (")
    assert (ended.saves, ended.alone) == (None, False)
    assert told_by(node) == {"2": "0", "3": "1"}
    assert list(node.verdict()) == ["of rank 2", "of rank 3"]


def test_what_ranks_raised_goes_to_all_nodes(tmp_path, call, store):
    node = node_of(tmp_path, 0, call, store)
    agent = node.running()
    leaves(call, 1, name="raised")
    node.worker_ended(agent, 1, 1)
    agent.say(End(1))
    node.expect(Failed)
    assert node.expect(Ended).storing.startswith("what its ranks raised (")
    assert told_by(node) == {"1": "0"}
    node.verdict(ERROR)


@pytest.mark.parametrize("is_there", [True, False])
def test_the_control_nodes_result_has_the_values_of_all_ranks(is_there, tmp_path, call, store):
    node = node_of(tmp_path, 0, call, store)
    agent = node.running()
    leaves(call, 0, 1)
    store.data = {str(rank): pickle.dumps(f"of rank {rank}") for rank in (2, 3) if is_there}
    ended, result = node.ends_well(agent, features={"functions": {"2": "2", "3": "3"}})
    assert ended.storing is None, "its own values need no way"
    if is_there:
        assert list(result) == [f"of rank {rank}" for rank in range(4)]
    else:
        assert result.cause["category"] == "store"


# --- on the control node --------------------------------------------------------------------------


@pytest.fixture
def keepers():
    keepers = Keepers({"functions": FunctionKeeper()})
    keepers.begin(0, {}, 0.0)
    keepers.handle(1, Told(0, 0, "functions", {"2": "key of 2", "3": "key of 3"}), 0.0)
    keepers.handle(2, Told(0, 0, "functions", {"4": "key of 4"}), 0.0)
    return keepers


def test_the_control_node_alone_hears_where_the_gathered_values_lie(keepers):
    of_all = {"2": "key of 2", "3": "key of 3", "4": "key of 4"}
    assert keepers.verdict(0, True, None) == {"functions": of_all}
    assert keepers.verdict(0, False, None) == keepers.verdict(1, True, None) == {}
    keepers.begin(0, {}, 0.0)  # a restart
    assert keepers.verdict(0, True, None) == {}


@pytest.mark.parametrize(("rank", "told"), [(3, {"functions": {"3": "key of 3"}}), (7, {}), (None, {})])
def test_all_nodes_hear_where_the_causes_exception_lies_and_of_no_other(rank, told, keepers):
    error = LaunchFailed("", Cause("exception", 1, "host", rank, None).as_dict())
    assert keepers.verdict(0, True, error) == keepers.verdict(0, False, error) == told
    assert keepers.verdict(0, True, LaunchFailed("")) == {}
