"""That restarts keep the nodes, and how long the pauses between many of them are."""

import pytest
from gang_of import crash, running

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Restart


def fail(gang, cause=None):
    """Have a generation fail on node 1 after two minutes, and the next one begin if one follows."""
    gang.pass_time(120.0)
    gang.failed(1, cause or crash(1))
    gang.stop()
    gang.pass_time(31.0)


def test_the_pause_has_a_limit_however_many_restarts_there_were():
    gang = running(2, max_restarts=3000)
    gang.state.launch.uncounted = -2000  # 2.0 ** 2000 is too large for a float
    fail(gang)
    assert [each.pause_s for each in gang.got(0, Restart)] == [30.0]


@pytest.mark.parametrize("kind", ["exit", "signal"])
def test_a_node_whose_workers_fail_again_and_again_takes_part_still(kind):
    gang = running(3, max_restarts=5, spare_nodes=1, min_nodes=1)
    for _ in range(3):
        fail(gang, crash(1, kind=kind))
    assert gang.groups() == [(0, 1)] * 4
