"""A node's seat in its gang: which launch hears what."""

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Abort, Farewell
from metaflow_extensions.torchrun.plugins.torchrun.node.endings import Broken, GivenUp, MustEnd
from metaflow_extensions.torchrun.plugins.torchrun.node.seat import Seat


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


def test_the_first_error_that_breaks_a_gang_counts():
    seat, error = Seat(1, 2, print, None), GangError("Node 3 is lost.")
    seat.deliver(Abort(error))
    seat.lose_control("its connection has ended")
    assert [news.error for news in heard(seat)] == [error, error]
    assert all(isinstance(news, Broken) for news in heard(seat))


def test_a_launch_that_still_runs_ends_with_the_control_node_also_after_its_farewell():
    seat = Seat(1, 2, print, None)
    seat.deliver(Farewell("bye"))
    seat.lose_control("its connection has ended")
    (news,) = heard(seat)
    assert "its connection has ended" in str(news.error)
    assert seat.broken is None, "no failure of a node whose launches are over"
