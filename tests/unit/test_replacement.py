"""A launch that goes on after the loss of a node because another task takes its place."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loss import ended, groups
from test_state import GangOf, crash, failures, objects_of, preemption

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.gang.nodes import NodeState
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    Abort,
    Alone,
    Failed,
    Go,
    Join,
    Prepares,
    Replaced,
    Restart,
    Stop,
    Verdict,
)
from metaflow_extensions.torchrun.plugins.torchrun.records.summary import summarize

TASKS = itertools.count()


def launched(num_nodes=3, max_restarts=3, **rules):
    gang = GangOf(num_nodes, **{"replacements": 1, "started_timeout_s": 300.0, **rules})
    gang.all_ready(max_restarts=max_restarts)
    return gang


def come(gang, node):
    """Have another task take a node's place."""
    gang.say(node, Join(node, f"new-{node}", task=f"task {next(TASKS)}", place="here"))


def test_the_workers_start_again_when_the_task_that_takes_its_place_is_ready():
    gang = launched()
    gang.lost(1)
    assert gang.state.nodes[1] is NodeState.LOST, "the others are still being stopped"
    ended(gang, 0, 2)
    assert gang.state.nodes[1] is NodeState.AWAITED
    (restart,) = gang.got(0, Restart)
    assert (restart.left, restart.came, restart.size) == ((1,), (1,), 3)
    gang.pass_time(60.0)
    assert gang.state.due_at == float("inf")
    come(gang, 1)
    gang.pass_time(1.0)
    assert len(groups(gang)) == 1, "it has not called run"
    gang.ready(1)
    assert gang.state.due_at <= gang.now
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 1, 2)]
    for node in range(3):
        gang.ended(node, generation=1)
    assert gang.same_verdict(0, 1, 2) is None


def test_a_spare_takes_the_place_at_once_and_the_new_task_is_the_next_spare():
    gang = launched(4, spare_nodes=1)
    gang.lost(1)
    ended(gang, 0, 2)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2, 3)]
    come(gang, 1)
    gang.ready(1)
    assert not gang.got(0, Stop)[1:]
    gang.lost(2)
    ended(gang, 0, 3, generation=1)
    gang.pass_time(0.0)
    assert groups(gang)[-1] == (0, 1, 3)


def test_without_one_in_time_it_goes_on_with_fewer_nodes_or_fails():
    for min_nodes, goes_on in ((2, True), (None, False)):
        gang = launched(min_nodes=min_nodes)
        gang.lost(1)
        ended(gang, 0, 2)
        gang.pass_time(301.0)
        gang.pass_time(0.0)
        if goes_on:
            assert groups(gang) == [(0, 1, 2), (0, 2)]
        else:
            said = str(gang.same_verdict(0, 2))
            assert "Node 1 (host host-1) failed: its task was killed by SIGKILL" in said
            assert (
                "2 nodes are left, and it needs 3 (spare_nodes, min_nodes). No other task has taken its place." in said
            )
        assert gang.state.nodes[1] is NodeState.OUT


def test_a_new_task_that_ends_before_it_is_ready_is_not_replaced_again():
    gang = launched(min_nodes=2)
    gang.lost(1)
    ended(gang, 0, 2)
    come(gang, 1)
    gang.lost(1)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2)]


def test_a_node_is_replaced_as_often_as_restarts_are_left():
    gang = launched(max_restarts=2)
    for generation in range(2):
        gang.lost(1)
        ended(gang, 0, 2, generation=generation)
        come(gang, 1)
        gang.ready(1)
        gang.pass_time(0.0)
    gang.lost(1)
    ended(gang, 0, 2, generation=2)
    assert "max_restarts=2 allows no more restarts" in str(gang.same_verdict(0, 2))


def test_a_new_task_gets_the_verdicts_of_the_launches_before():
    gang = launched()
    for node in range(3):
        gang.ended(node)
    for node in range(3):
        gang.ready(node, 1, max_restarts=3)
    gang.lost(1)
    for node in (0, 2):
        gang.ended(node, ok=False, launch=1)
    come(gang, 1)
    gang.ready(1, 0)
    late = gang.got(1, Verdict)[-1]
    assert (late.launch, late.error, late.group.nodes) == (0, None, (0, 1, 2))
    gang.ready(1, 1)
    gang.pass_time(0.0)
    assert groups(gang)[-1] == (0, 1, 2)


def test_the_verdicts_of_thousands_of_launches_take_no_more_memory_and_a_task_that_needs_more_is_told():
    gang = launched(min_nodes=2)

    def launch_until(number, *nodes):
        for launch in range(gang.got(0, Go)[-1].launch + 1, number):
            for node in nodes:
                gang.ready(node, launch, max_restarts=3)
            for node in nodes:
                gang.ended(node, launch=launch)
            for sent in gang.sent.values():
                del sent[:-3]

    for node in range(3):
        gang.ended(node)
    launch_until(1600, 0, 1, 2)  # by then the records are bounded, too
    before = objects_of(gang.state)
    launch_until(1800, 0, 1, 2)
    assert objects_of(gang.state) < before + 100
    gang.lost(1)
    come(gang, 1)
    gang.ready(1, 0)
    late = gang.got(1, Verdict)[-1]
    assert (late.launch, type(late.error)) == (0, GangError)
    assert "The end of launch 0 is not known any more" in str(late.error)
    launch_until(1801, 0, 2)
    assert gang.got(0, Verdict)[-1].launch == 1800
    assert gang.verdict(0, launch=1800) is None


@pytest.mark.parametrize("when", ["gathering", "between", "told to end between"])
def test_a_node_lost_before_a_launch_is_waited_for(when):
    gang = GangOf(3, replacements=1) if when == "gathering" else launched()
    number = 0
    if when == "gathering":
        gang.ready(0, max_restarts=3)
        gang.ready(1)
    else:
        number = 1
        for node in range(3):
            gang.ended(node)
    if when.startswith("told"):
        gang.leave(1, preemption(1))
    else:
        gang.lost(1)
    assert gang.state.broken is None
    assert gang.state.nodes[1] is NodeState.AWAITED
    for node in (0, 2):
        gang.ready(node, number, max_restarts=3)
    assert len(groups(gang)) == number
    come(gang, 1)
    if number:
        gang.ready(1, 0)
    gang.ready(1, number)
    assert groups(gang)[-1] == (0, 1, 2)
    assert not gang.got(0, Restart)


def test_a_node_that_was_told_to_end_is_replaced_too():
    gang = launched()
    gang.failed(1, preemption(1))
    ended(gang, 0, 1, 2)
    gang.leave(1, failed=True)
    assert gang.state.nodes[1] is NodeState.AWAITED
    come(gang, 1)
    gang.ready(1)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 1, 2)]
    assert gang.state.restarts_left == 3


def test_the_task_that_is_gone_can_not_come_back():
    gang = GangOf(3, join=False, replacements=1)
    first = [Join(node, f"host-{node}", task=f"first {node}") for node in range(3)]
    for each in first:
        gang.say(each.node, each)
    gang.all_ready(max_restarts=3)
    gang.lost(1)
    ended(gang, 0, 2)
    assert not gang.state.nodes.may_join(first[1])
    gang.ready(1)
    assert gang.got(1, Verdict), "it hears that the others go on without it"
    assert len(groups(gang)) == 1


@pytest.mark.parametrize("when", ["before the first launch", "between launches"])
def test_a_task_that_was_told_to_end_in_its_own_code_fails_no_run(when):
    gang = GangOf(3, replacements=1, started_timeout_s=300.0)
    launch = 0
    if when == "between launches":
        gang.all_ready(max_restarts=3)
        gang.all_ended()
        launch = 1
    gang.leave(1, preemption(1))
    come(gang, 1)
    if launch:
        gang.ready(1, 0)  # what is over
    gang.all_ready(launch, max_restarts=3)
    gang.all_ended(launch=launch)
    for node in (0, 1, 2):
        gang.done(node)
    for node in (1, 2):
        gang.leave(node)
    assert not gang.got(0, Abort)
    assert gang.got(0, Alone)


def test_a_new_task_that_contradicts_the_others_is_refused_alone():
    gang = launched(min_nodes=2)
    gang.lost(1)
    ended(gang, 0, 2)
    come(gang, 1)
    gang.ready(1, nproc=7)
    error = gang.verdict(1)
    assert str(error).startswith("The nodes differ in the processes per node")
    assert error.cause["node"] == 1, "no other node shows it"
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2)]


@pytest.mark.parametrize("state", ["runs", "is stopped", "has ended well"])
def test_a_task_that_comes_before_the_one_in_its_place_has_ended_tries_again(state):
    gang = launched()
    if state == "is stopped":
        gang.failed(1, preemption(1))
    elif state == "has ended well":
        gang.done(1)
    newcomer = Join(1, "new-1", task="second", place="another pod")
    assert not gang.state.nodes.may_join(newcomer)
    for _ in range(2):
        refused, out = gang.state.turn_away(newcomer)
        gang.post(out)
        assert (refused.is_early, refused.hold_s) == (True, 0.0)
        assert "the task before it, on host host-1, has not ended yet" in str(refused.error)
    assert len(gang.got(1, Replaced)) == (state == "runs")
    gang.lost(1)
    assert gang.state.nodes.may_join(newcomer) == (gang.state.nodes[1] is NodeState.AWAITED)


def test_each_task_in_a_nodes_place_can_be_told_that_it_is_replaced():
    gang = launched()
    for generation, place in enumerate(("second", "third")):
        _, out = gang.state.turn_away(Join(1, "new", place, place))
        gang.post(out)
        assert len(gang.got(1, Replaced)) == generation + 1
        gang.failed(1, preemption(1), generation=generation)
        ended(gang, 0, 1, 2, generation=generation)
        come(gang, 1)
        gang.ready(1)
        gang.pass_time(0.0)
    assert gang.state.restarts_left == 3


def test_a_broken_gang_or_the_control_nodes_place_takes_no_other_task():
    gang = launched()
    refused, _ = gang.state.turn_away(Join(0, "new", "second", "another pod"))
    assert not refused.is_early
    gang.state.give_up(GangError("The channel failed."))
    refused, _ = gang.state.turn_away(Join(1, "new", "second", "another pod"))
    assert not refused.is_early


def test_several_tasks_may_come_in_a_row_before_one_is_ready():
    gang = launched(min_nodes=2, replacements=2)
    for _ in range(2):
        gang.lost(1)
        ended(gang, 0, 2)
        gang.pass_time(0.0)
        assert gang.state.nodes[1] is NodeState.AWAITED
        come(gang, 1)
    gang.lost(1)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 2)]
    gang = launched(replacements=2)
    for generation in range(3):  # one that is ready counts as none
        gang.lost(1)
        ended(gang, 0, 2, generation=generation)
        come(gang, 1)
        gang.ready(1)
        gang.pass_time(0.0)
    assert len(groups(gang)) == 4


def gone_on_without_1():
    """Return a gang of three whose nodes 0 and 2 have gone on, since no other task came in the place of node 1."""
    gang = launched(min_nodes=2)
    gang.lost(1)
    ended(gang, 0, 2)
    gang.pass_time(301.0)
    gang.pass_time(0.0)
    assert groups(gang)[-1] == (0, 2)
    assert gang.state.nodes[1] is NodeState.OUT
    return gang


def test_a_task_that_comes_when_the_others_have_gone_on_is_a_spare():
    gang = gone_on_without_1()
    come(gang, 1)
    gang.ready(1)
    assert [record.kind for record in gang.records][-2:] == ["spare", "ready"]
    gang.failed(2, crash(2), generation=1)
    ended(gang, 0, 2, generation=1)
    gang.pass_time(31.0)
    assert groups(gang)[-1] == (0, 1, 2)


def test_a_task_that_comes_after_the_end_finds_nothing_to_do():
    gang = gone_on_without_1()
    for node in (0, 2):
        gang.ended(node, generation=1)
        gang.done(node)
    gang.leave(2)
    assert gang.got(0, Alone)
    newcomer = Join(1, "new", "second", "another pod")
    assert not gang.state.nodes.may_join(newcomer)
    assert gang.state.turn_away(newcomer)[0].is_early, "it will find the record of the gang's end"


@pytest.mark.parametrize("when", ["before the end", "joins before it", "later"])
def test_a_task_that_comes_too_late_to_take_part_leaves(when):
    """A spare has taken its place; the others wait for it neither in the next launch nor at the end."""
    gang = launched(4, spare_nodes=1)
    gang.lost(1)
    ended(gang, 0, 2)
    gang.pass_time(0.0)
    comes = [lambda: come(gang, 1), lambda: gang.ready(1)]
    for _ in range({"before the end": 2, "joins before it": 1, "later": 0}[when]):
        comes.pop(0)()
    for node in (0, 2, 3):
        gang.ended(node, generation=1)
    for node in (0, 2):
        gang.ready(node, launch=1)
    for each in comes:
        each()
    gang.ready(3, launch=1)
    (verdict,) = gang.got(1, Verdict)
    assert verdict.is_without(1)
    assert groups(gang)[2:] == [(0, 2, 3)]
    for node in (0, 2, 3):
        gang.ended(node, launch=1)
        gang.done(node)
    for node in (2, 3):
        gang.leave(node)
    assert gang.got(0, Alone)


def test_a_task_that_was_dismissed_and_calls_a_launch_whose_end_is_forgotten_is_told():
    gang = launched(4, spare_nodes=1)
    gang.lost(1)
    ended(gang, 0, 2)
    gang.pass_time(0.0)
    come(gang, 1)
    for node in (0, 2, 3):
        gang.ended(node, generation=1)
    for launch in range(1, 1010):
        for node in (0, 2, 3):
            gang.ready(node, launch=launch)
        for node in (0, 2, 3):
            gang.ended(node, launch=launch)
    gang.ready(1)
    (verdict,) = gang.got(1, Verdict)
    assert "The end of launch 0 is not known any more" in str(verdict.error)


def test_commands_that_fail_end_the_launch_when_a_node_is_no_longer_awaited():
    gang = GangOf(3, replacements=1, min_nodes=2, started_timeout_s=300.0)
    for node in (0, 2):
        gang.say(node, Prepares(0, 2))
    gang.lost(1)
    gang.say(0, Failed(0, failures=failures([crash(0, kind="command")])))
    gang.ready(2)
    assert not gang.got(2, Verdict)
    gang.pass_time(301.0)
    assert "before_run failed" in str(gang.same_verdict(0, 2))


@pytest.mark.parametrize("comes", [1, 3])
def test_commands_that_fail_on_two_nodes_end_the_launch_if_the_first_is_lost(comes):
    gang = GangOf(4, spare_nodes=1, replacements=1 if comes == 1 else 0)
    for node in (1, 2):
        gang.say(node, Prepares(0, 2))
    for node in (1, 2):
        gang.say(node, Failed(0, failures=failures([crash(node, kind="command")])))
    gang.lost(1)
    if comes == 1:
        come(gang, 1)
        gang.ready(1)
    gang.ready(3)
    gang.ready(0, max_restarts=3)
    assert "before_run failed" in str(gang.same_verdict(0, 2))


def test_a_new_task_that_never_calls_run_holds_up_others_no_longer_than_one_that_does_not_come():
    for min_nodes, goes_on in ((2, True), (None, False)):
        gang = launched(min_nodes=min_nodes)
        gang.lost(1)
        ended(gang, 0, 2)
        come(gang, 1)
        gang.pass_time(300.0)
        assert len(groups(gang)) == 1
        gang.pass_time(2.0)
        gang.pass_time(0.0)
        assert groups(gang)[1:] == [(0, 2)] * goes_on, "with too few, it waits as at the begin"
        gang.ready(1)
        gang.pass_time(0.0)
        assert groups(gang)[1:] == ([(0, 2)] if goes_on else [(0, 1, 2)])


@pytest.mark.parametrize("when", ["while a spare runs", "while it is awaited"])
def test_the_own_error_of_a_new_task_harms_nobody_else(when):
    gang = launched(4, spare_nodes=1) if when == "while a spare runs" else launched(4, min_nodes=3)
    gang.lost(1)
    ended(gang, 0, 2, 3)
    gang.pass_time(0.0)
    come(gang, 1)
    gang.leave(1, crash(1, kind="step"))
    gang.pass_time(0.0)
    assert groups(gang)[1:] == [(0, 2, 3)]
    assert len(gang.got(0, Stop)) == 1
    assert gang.state.nodes[1] is NodeState.OUT
    assert gang.state._course.gone[1].kind == "step"
    assert gang.state.restarts_left == 2


def test_it_does_not_wait_for_one_task_where_another_is_missing_for_good():
    gang = launched()
    gang.lost(1)
    gang.lost(2)
    ended(gang, 0)
    come(gang, 1)
    gang.lost(1, "it ended at once")
    gang.pass_time(0.0)
    assert "1 node is left, and it needs 3" in str(gang.same_verdict(0))


def test_a_restart_names_a_node_that_came_again_also_when_another_does_not():
    gang = launched(min_nodes=2)
    gang.lost(1)
    gang.lost(2)
    ended(gang, 0)
    come(gang, 1)
    gang.ready(1)
    come(gang, 2)
    gang.lost(2)
    gang.pass_time(0.0)
    assert groups(gang)[-1] == (0, 1)
    told = [(each.number, each.left, each.came, each.size) for each in gang.got(0, Restart)]
    assert told == [(1, (1, 2), (1, 2), 3), (1, (1, 2), (1,), 2)]


def test_a_loss_in_the_pause_fails_the_launch_if_restart_on_does_not_have_it():
    gang = GangOf(3, replacements=1)
    gang.all_ready(max_restarts=3, restart_on=frozenset({"user"}))
    gang.failed(2, crash(2))
    ended(gang, 0, 1, 2)
    gang.lost(1)
    assert "Node 1 (host host-1) failed: its task was killed" in str(gang.same_verdict(0, 2))


def test_a_node_that_never_joined_is_waited_for_once():
    gang = GangOf(3, join=False, replacements=1, min_nodes=2, started_timeout_s=300.0)
    gang.join(0, 2)
    for node in (0, 2):
        gang.ready(node, max_restarts=3)
    gang.pass_time(301.0)
    assert groups(gang) == [(0, 2)]
    assert gang.state.nodes[1] is NodeState.OUT
    come(gang, 1)
    gang.ready(1)
    gang.lost(2)
    ended(gang, 0)
    gang.pass_time(301.0)
    gang.pass_time(0.0)
    assert groups(gang)[1:] == [(0, 1)]


def test_the_error_says_what_came_of_the_task_in_its_place():
    gang = launched()
    gang.lost(1)
    ended(gang, 0, 2)
    come(gang, 1)
    gang.say(1, Prepares(0, 2))
    gang.say(1, Failed(0, failures=failures([crash(1, kind="command")])))
    gang.pass_time(0.0)
    said = str(gang.same_verdict(0, 2))
    assert "The task in its place can't take part: " in said
    assert "part: failed" not in said
    assert "before_run failed. The others go on without it." in str(gang.verdict(1))


def test_a_new_task_that_has_heard_of_all_launches_has_caught_up():
    gang = launched()
    for node in range(3):
        gang.ended(node)
    for _ in range(2):
        gang.lost(1)
        assert gang.state.nodes[1] is NodeState.AWAITED
        come(gang, 1)
        gang.ready(1, 0)


def test_a_command_that_fails_in_the_new_task_harms_nobody_else():
    gang = launched(4, spare_nodes=1)
    gang.lost(1)
    ended(gang, 0, 2)
    gang.pass_time(0.0)
    come(gang, 1)
    gang.say(1, Prepares(0, 2))
    gang.say(1, Failed(0, failures=failures([crash(1, kind="command")])))
    assert "before_run" in str(gang.verdict(1))
    assert len(gang.got(0, Stop)) == 1
    assert gang.state.nodes[1] is NodeState.OUT


def test_the_control_node_waits_for_a_new_task_at_its_end():
    gang = launched(3, min_nodes=2)
    gang.lost(1)
    ended(gang, 0, 2)
    come(gang, 1)
    gang.ready(1)
    gang.pass_time(0.0)
    for node in range(3):
        gang.ended(node, generation=1)
    gang.lost(1)
    for node in (0, 2):
        gang.done(node)
    gang.leave(2)
    assert not gang.got(0, Alone)
    come(gang, 1)
    gang.ready(1)
    assert gang.got(1, Verdict)[-1].error is None
    gang.done(1)
    gang.leave(1)
    assert gang.got(0, Alone)


def test_without_replacements_nothing_is_awaited():
    gang = launched(replacements=0)
    gang.lost(1)
    ended(gang, 0, 2)
    assert "Node 1" in str(gang.same_verdict(0, 2))
    assert gang.state.nodes[1] is NodeState.LOST


STEPS = st.sampled_from(["lost", "told", "crash", "end", "tick", "come", "ready", "long"])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(STEPS, st.integers(1, 4)), max_size=40), st.integers(0, 2), st.integers(2, 3))
def test_whatever_happens_no_generation_has_a_node_that_is_not_ready(happened, spares, least):
    gang = launched(5, max_restarts=4, spare_nodes=spares, min_nodes=min(least, 5 - spares))
    for what, node in happened:
        there = gang.state.nodes[node] is NodeState.JOINED
        goes = gang.got(0, Go)
        generation = goes[-1].generation
        if what == "lost":
            gang.lost(node)
        elif what in ("told", "crash") and there:
            gang.failed(node, preemption(node) if what == "told" else crash(node), generation=generation)
        elif what == "come" and gang.state.nodes[node] is NodeState.AWAITED:
            come(gang, node)
        elif what == "ready" and there and node not in gang.state._launch.ready:
            gang.ready(node)
        elif what == "end":
            for each in gang.state.nodes.joined:
                gang.ended(each, ok=False, generation=generation)
        else:
            gang.pass_time(301.0 if what == "long" else 31.0)
        for go in gang.got(0, Go)[len(goes) :]:
            assert set(go.group.nodes) <= set(gang.state.nodes.joined)
            assert all(node in gang.state._launch.ready for node in go.group.nodes)
            assert go.group.size == len(set(go.group.nodes)) >= min(least, 5 - spares)


def test_the_page_shows_who_takes_part():
    def shown(gang):
        found = summarize(gang.records, 4, 2, None)
        return [rank.node for rank in found.ranks[::2]], [node.state for node in found.nodes]

    gang = launched(4, spare_nodes=1)
    assert shown(gang) == ([0, 1, 2], ["starting", "starting", "starting", "waiting"])
    gang.lost(1)
    ended(gang, 0, 2)
    gang.pass_time(0.0)
    assert shown(gang) == ([0, 2, 3], ["starting", "lost", "starting", "starting"])
    come(gang, 1)
    gang.ready(1)
    assert shown(gang) == ([0, 2, 3], ["starting", "waiting", "starting", "starting"])
    gang.lost(2)
    ended(gang, 0, 3, generation=1)
    gang.pass_time(0.0)
    assert shown(gang) == ([0, 1, 3], ["starting", "starting", "lost", "starting"])
    come(gang, 2)
    gang.lost(3)
    ended(gang, 0, 1, generation=2)
    gang.ready(2)
    gang.pass_time(0.0)
    assert shown(gang) == ([0, 1, 2], ["starting", "starting", "starting", "lost"])


def test_a_gang_that_fails_anyway_counts_no_silent_node_as_lost():
    gang = launched(max_restarts=0)
    gang.failed(2, crash(2))
    ended(gang, 0, 2)
    gang.pass_time(46.0)
    assert "Node 1 did not report in time" in str(gang.same_verdict(0, 1, 2))
    assert gang.state.nodes[1] is NodeState.JOINED


def test_a_step_that_ends_without_calling_run_is_named_as_what_came():
    gang = launched()
    gang.lost(1)
    ended(gang, 0, 2)
    come(gang, 1)
    gang.done(1)
    gang.leave(1)
    gang.pass_time(0.0)
    said = str(gang.same_verdict(0, 2))
    assert "The step of the task in its place has ended without calling run." in said


def test_the_log_says_when_a_node_is_not_waited_for_any_more():
    gang = launched(4, spare_nodes=1)
    gang.lost(1)
    ended(gang, 0, 2, 3)
    gang.pass_time(0.0)
    come(gang, 1)
    gang.lost(1, "its task was killed by SIGKILL, too")
    said = (
        "node 1 is not waited for any more. The task in its place can't take part: its task was killed by SIGKILL, too."
    )
    assert said in gang.notes(0)


def test_a_restart_names_a_node_that_is_lost_in_the_pause_and_comes_again():
    gang = launched()
    gang.failed(2, crash(2))
    ended(gang, 0, 1, 2)
    gang.lost(1)
    come(gang, 1)
    gang.ready(1)
    gang.pass_time(31.0)
    assert groups(gang)[-1] == (0, 1, 2)
    told = [(each.number, each.left, each.came) for each in gang.got(0, Restart)]
    assert told == [(1, (), ()), (1, (1,), (1,))]


def test_an_older_task_gives_way_to_a_newer_one():
    """A pod that waits and is deleted meanwhile tries again as long as it has its grace, beside the next one."""
    gang = launched()
    older, newer = (Join(1, "new", each, each) for each in ("second", "third"))
    for each in (older, newer):
        assert gang.state.turn_away(each)[0].is_early
    gang.failed(1, preemption(1))
    ended(gang, 0, 1, 2)
    assert gang.state.nodes.may_join(older)
    gang.say(1, newer)
    gang.ready(1)
    refused, out = gang.state.turn_away(older)
    assert (refused.is_early, out) == (False, [])
    assert "a newer task has taken its place" in str(refused.error)
    gang.lost(1)
    gang.pass_time(0.0)
    assert not gang.state.nodes.may_join(older)


def test_a_restart_after_a_node_was_told_to_end_while_others_store_goes_on():
    gang = launched()
    for node in range(3):
        gang.ended(node, stores=node == 2)
    gang.give_up(1, preemption(1))
    come(gang, 1)
    gang.lost(2)
    gang.pass_time(0.0)
    assert [each.number for each in gang.got(0, Restart)] == [1]
    come(gang, 2)
    for node in (1, 2):
        gang.ready(node)
    gang.pass_time(0.0)
    assert groups(gang) == [(0, 1, 2), (0, 1, 2)]
