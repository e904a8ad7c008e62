"""A node's side of its gang: which launch hears what."""

from metaflow_extensions.torchrun.plugins.torchrun.supervisor.endings import GivenUp, MustEnd
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.side import Side


def heard(side):
    return [side.inbox.get_nowait() for _ in range(side.inbox.qsize())]


def test_each_of_several_launches_that_wait_for_the_end_of_another_has_its_own_news():
    """As after two double Ctrl-C, both caught: the first launch is still being stopped."""
    side = Side(0, 1, print, None)
    side.begin_launch()
    side.expect_launch()
    side.put(GivenUp(None))
    side.expect_launch()
    side.put(MustEnd("its machine goes"))
    assert heard(side) == []
    side.begin_launch()
    assert heard(side) == [GivenUp(None)]
    side.begin_launch()
    assert heard(side) == [MustEnd("its machine goes")]
