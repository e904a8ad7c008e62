"""Which nodes take part in a generation: told in few words, and chosen anew after a loss."""

from hypothesis import given
from hypothesis import strategies as st

from metaflow_extensions.torchrun.plugins.torchrun.gang.group import Group, follow

NODES = st.sets(st.integers(0, 12), min_size=1)


@given(NODES, st.integers(0, 13))
def test_it_is_the_nodes_in_order(nodes, other):
    group, ordered = Group.of(nodes), tuple(sorted(nodes))
    assert group.nodes == ordered
    assert [group.rank_of(node) for node in ordered] == list(range(group.size))
    assert (group.rank_of(other) is None) == (other not in nodes)


def test_few_words_tell_thousands_of_nodes():
    assert Group.of(set(range(4000)) - {17}) == Group(3999, (17,))


@given(NODES, NODES, st.integers(1, 13), st.integers(1, 13))
def test_who_can_stays_and_others_fill_it_up(before, able, size, least):
    group = follow(Group.of(before), sorted(able), size, least)
    if group is None:
        assert len(able) < least or len(before & able) + max(0, size - len(before & able)) < least
        return
    after = set(group.nodes)
    assert after <= able
    assert before & able <= after
    assert len(after) >= least
    if len(able) >= size >= len(before & able):
        assert len(after) == size
    came, waits = after - before, able - after
    assert all(one < other for one in came for other in waits - before)
