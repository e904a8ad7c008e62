"""A node's seat in its gang: which launch hears what."""

from metaflow_extensions.torchrun.plugins.torchrun.supervisor.endings import GivenUp, MustEnd
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.seat import Seat


def heard(seat):
    return [seat.inbox.get_nowait() for _ in range(seat.inbox.qsize())]


def test_each_of_several_launches_that_wait_for_the_end_of_another_has_its_own_news():
    """As after two double Ctrl-C, both caught: the first launch is still being stopped."""
    seat = Seat(0, 1, print, None)
    seat.begin_launch()
    seat.expect_launch()
    seat.put(GivenUp(None))
    seat.expect_launch()
    seat.put(MustEnd("its machine goes"))
    assert heard(seat) == []
    seat.begin_launch()
    assert heard(seat) == [GivenUp(None)]
    seat.begin_launch()
    assert heard(seat) == [MustEnd("its machine goes")]
