"""What restarts cost, and which node they go on without: a node whose workers fail again and again."""

from dataclasses import replace

import pytest
from test_loss import groups
from test_replacement import come
from test_state import GangOf, crash

from metaflow_extensions.torchrun.plugins.torchrun.features.progress.keep import ProgressKeeper
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Keepers
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Alone, Restart, Told, Verdict
from metaflow_extensions.torchrun.plugins.torchrun.records.summary import summarize


def launched(num_nodes=2, max_restarts=2, **rules):
    gang = GangOf(num_nodes, keepers=Keepers({"progress": ProgressKeeper()}), **rules)
    gang.all_ready(max_restarts=max_restarts)
    return gang


def generation_of(gang):
    return gang.state._launch.generation


def report(gang, step):
    told = {"step": step, "total": None, "points": {}, "paces": {}}
    gang.say(0, Told(0, generation_of(gang), "progress", told))


def fail(gang, node=1, cause=None):
    """Have a generation fail on a node, and the next one begin if one follows."""
    generation = generation_of(gang)
    gang.failed(node, cause or crash(node), generation=generation)
    for each in gang.state.nodes.joined:
        gang.ended(each, ok=False, generation=generation)
    gang.pass_time(31.0)


# --- max_restarts -----------------------------------------------------------------------------------


def test_max_restarts_counts_all_restarts_however_far_the_script_has_come():
    gang = launched(max_restarts=3)
    for step in (5, 9, 10, 11):
        report(gang, step)
        fail(gang)
    assert [(each.number, each.of) for each in gang.got(0, Restart)] == [(1, 3), (2, 3), (3, 3)]
    assert gang.state.restarts_left == 0
    assert gang.same_verdict(0, 1) is not None


def test_a_script_that_comes_no_further_has_all_its_restarts_too():
    gang = launched(max_restarts=5)
    for _ in range(5):
        report(gang, 7)
        fail(gang)
    assert not gang.got(0, Verdict)
    assert gang.state.restarts_left == 0


def test_the_pause_grows_with_each_restart_and_has_a_limit():
    gang = launched(max_restarts=3000)
    for step in range(6):
        report(gang, step)
        fail(gang)
    assert [each.pause_s for each in gang.got(0, Restart)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    gang.state._launch.generation = 2000  # 2.0 ** 2000 is too large for a float
    fail(gang)
    assert gang.got(0, Restart)[-1].pause_s == 30.0


# --- a node whose workers fail again and again --------------------------------------------------------


def test_a_node_that_fails_first_twice_in_a_row_waits_to_the_end():
    gang = launched(3, max_restarts=5, spare_nodes=1)
    fail(gang)
    assert groups(gang) == [(0, 1), (0, 1)]
    fail(gang)
    assert groups(gang)[2:] == [(0, 2)]
    (*_, last) = gang.got(0, Restart)
    assert (last.left, last.came) == ((1,), (2,))
    assert any(
        "node 1 takes no part any more: its workers were the first to fail twice in a row: " in each
        for each in gang.notes(0)
    )
    page = summarize(gang.records, 3, 1, None)
    assert [rank.node for rank in page.ranks] == [0, 2]
    for node in range(3):
        if node != 1:
            gang.ended(node, generation=2)
    assert gang.same_verdict(0, 1, 2) is None
    for node in range(3):
        gang.ready(node, 1, max_restarts=5)
    assert groups(gang)[3:] == [(0, 2)], "nor in the next launch"
    for node in (0, 2):
        gang.ended(node, launch=1)
    for node in (1, 2, 0):
        gang.done(node)
    for node in (1, 2):
        gang.leave(node)
    assert gang.got(0, Alone)


@pytest.mark.parametrize("nodes", [(1, 2, 1, 2), (0, 0, 0)])
def test_nodes_that_fail_in_turns_and_the_control_node_stay(nodes):
    gang = launched(4, max_restarts=5, spare_nodes=1)
    for node in nodes:
        fail(gang, node)
    assert set(groups(gang)) == {(0, 1, 2)}


def test_without_other_nodes_it_stays():
    for rules in ({}, {"min_nodes": 2}):
        gang = launched(2, max_restarts=5, **rules)
        for _ in range(3):
            fail(gang)
        assert set(groups(gang)) == {(0, 1)}


def test_fewer_nodes_go_on_without_it_if_its_script_has_no_error():
    for kind, last in (("signal", (0, 2)), ("exit", (0, 1, 2))):
        gang = launched(3, max_restarts=5, min_nodes=2)
        for _ in range(2):
            fail(gang, 1, crash(1, kind=kind))
        assert groups(gang)[2:] == [last]


@pytest.mark.parametrize("why", ["a consequence", "no restart is left"])
def test_it_stays_where_it_is_not_to_blame(why):
    gang = launched(3, max_restarts=1 if why == "no restart is left" else 5, spare_nodes=1)
    text = "RuntimeError: NCCL error: remote process exited or there was a network error"
    cause = replace(crash(1, kind="exception"), exception=text)
    assert cause.is_consequence
    for _ in range(2):
        fail(gang, 1, cause if why == "a consequence" else None)
    assert set(groups(gang)) == {(0, 1)}
    assert not any("takes no part" in each for each in gang.notes(0))


def test_a_node_that_was_set_aside_takes_no_part_even_where_too_few_are_left():
    gang = launched(3, max_restarts=5, spare_nodes=1)
    for _ in range(2):
        fail(gang)
    assert groups(gang)[-1] == (0, 2)
    assert [(each.left, each.came) for each in gang.got(0, Restart)] == [((), ()), ((1,), (2,))]
    gang.lost(2)
    gang.ended(0, ok=False, generation=2)
    assert "1 node is left, and it needs 2 (spare_nodes, min_nodes). It had set node 1 aside before." in str(
        gang.same_verdict(0, 1)
    )


def test_another_task_in_the_place_of_a_node_that_was_set_aside_may_take_part():
    gang = launched(3, max_restarts=9, spare_nodes=1, replacements=1, started_timeout_s=300.0)
    for _ in range(2):
        fail(gang)
    assert groups(gang)[-1] == (0, 2)
    gang.lost(1)
    come(gang, 1)
    gang.ready(1)
    gang.lost(2)
    gang.ended(0, ok=False, generation=2)
    gang.pass_time(60.0)
    assert groups(gang)[-1] == (0, 1)


def test_a_lost_node_is_replaced_though_another_was_set_aside():
    rules = {"replacements": 1, "started_timeout_s": 300.0}
    gang = launched(4, max_restarts=5, spare_nodes=1, **rules)
    check_fails(gang, 1)
    assert groups(gang)[-1] == (0, 2, 3)
    gang.lost(3)
    for node in (0, 2):
        gang.ended(node, ok=False, generation=1)
    gang.pass_time(60.0)
    assert groups(gang)[-1] == (0, 2, 3), "the node that has failed its check is no spare"
    assert (gang.got(0, Restart)[-1].left, gang.got(0, Restart)[-1].came) == ((3,), (3,))


# --- node_check ---------------------------------------------------------------------------------------


def check_fails(gang, *nodes, generation=0):
    for node in nodes:
        gang.ended(node, crash(node, kind="check"), generation=generation)
    for node in set(gang.state.nodes.joined) - set(nodes):
        gang.ended(node, ok=False, generation=generation)
    gang.pass_time(0.0)


def test_nodes_whose_check_fails_take_no_part_and_cost_no_restart():
    gang = launched(5, max_restarts=1, spare_nodes=1, min_nodes=2)
    check_fails(gang, 1, 2)
    assert groups(gang) == [(0, 1, 2, 3), (0, 3, 4)]
    assert gang.state.restarts_left == 1
    assert sum("takes no part any more" in each for each in gang.notes(0)) == 2
    for node in (0, 3, 4):
        gang.ended(node, generation=1)
    assert gang.same_verdict(*range(5)) is None


@pytest.mark.parametrize("node", [0, 1])
def test_a_check_that_fails_where_no_other_node_is_fails_the_launch(node):
    for rules in ({}, {"min_nodes": 2}, {"spare_nodes": 1}):
        if node == 1 and rules == {"spare_nodes": 1}:
            continue
        gang = launched(3, max_restarts=3, **rules)
        if rules == {"min_nodes": 2} and node == 1:
            check_fails(gang, 1, 2)
        else:
            check_fails(gang, node)
        assert "The reason: a command of node_check failed (class node_check)." in str(gang.same_verdict(0, 1, 2))
        assert not gang.got(0, Restart)


def test_without_restarts_a_check_that_fails_fails_the_launch():
    gang = launched(3, max_restarts=0, spare_nodes=1)
    check_fails(gang, 1)
    assert "It can't go on without that node: max_restarts=0 allows no more restarts." in str(
        gang.same_verdict(0, 1, 2)
    )


def test_checks_that_fail_come_to_an_end():
    """Two nodes fail it, a third is lost: neither of the two takes part again, at no cost and without a pause."""
    gang = launched(4, max_restarts=1, spare_nodes=1, min_nodes=2)
    check_fails(gang, 1)
    check_fails(gang, 2, generation=1)
    assert groups(gang)[-1] == (0, 3)
    gang.lost(3)
    gang.ended(0, ok=False, generation=2)
    assert "1 node is left, and it needs 2" in str(gang.same_verdict(0, 1, 2))


@pytest.mark.parametrize("other", [0, 2])
def test_a_check_fails_while_another_node_is_the_first_to_fail_again(other):
    """Only one spare is there: it takes the place of the node that must not take part."""
    gang = launched(4, max_restarts=5, spare_nodes=1)
    fail(gang, other, crash(other, kind="signal"))
    generation = generation_of(gang)
    gang.failed(other, crash(other, kind="signal"), generation=generation, age_s=2.0)
    check_fails(gang, 1, generation=generation)
    gang.pass_time(31.0)
    assert groups(gang)[-1] == (0, 2, 3)


def test_a_failed_check_makes_an_error_in_the_script_no_fault_of_a_node():
    gang = launched(4, max_restarts=5, min_nodes=2)
    fail(gang, 2)
    generation = generation_of(gang)
    gang.failed(2, crash(2), generation=generation, age_s=2.0)
    check_fails(gang, 1, generation=generation)
    gang.pass_time(31.0)
    assert groups(gang)[-1] == (0, 2, 3)
