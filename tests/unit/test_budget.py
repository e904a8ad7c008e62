"""How many restarts there are, with what pauses, and that they keep the nodes."""

import pytest
from test_loss import groups
from test_state import GangOf, crash

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Restart


def launched(num_nodes=2, max_restarts=2, **rules):
    gang = GangOf(num_nodes, **rules)
    gang.all_ready(max_restarts=max_restarts)
    return gang


def generation_of(gang):
    return gang.state._launch.generation


def fail(gang, node=1, cause=None):
    """Have a generation fail on a node, and the next one begin if one follows."""
    generation = generation_of(gang)
    gang.failed(node, cause or crash(node), generation=generation)
    for each in gang.state.nodes.joined:
        gang.ended(each, ok=False, generation=generation)
    gang.pass_time(31.0)


def test_max_restarts_counts_all_restarts_of_a_launch():
    gang = launched(max_restarts=3)
    for _ in range(4):
        fail(gang)
    assert [(each.number, each.of) for each in gang.got(0, Restart)] == [(1, 3), (2, 3), (3, 3)]
    assert gang.state.restarts_left == 0
    assert gang.same_verdict(0, 1) is not None


def test_the_pause_grows_with_each_restart_and_has_a_limit():
    gang = launched(max_restarts=3000)
    for _ in range(6):
        fail(gang)
    assert [each.pause_s for each in gang.got(0, Restart)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    gang.state._launch.generation = 2000  # 2.0 ** 2000 is too large for a float
    fail(gang)
    assert gang.got(0, Restart)[-1].pause_s == 30.0


@pytest.mark.parametrize("kind", ["exit", "signal"])
def test_a_node_whose_workers_fail_again_and_again_takes_part_still(kind):
    gang = launched(3, max_restarts=5, spare_nodes=1, min_nodes=1)
    for _ in range(3):
        fail(gang, 1, crash(1, kind=kind))
    assert groups(gang) == [(0, 1)] * 4
