"""Whose each line of the tasks' logs is, and how the logs of many nodes become one."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.show.stored_logs import Line, Source, merged


def node_of(rank):
    return {0: 0, 1: 0, 2: 1, 3: 1}.get(rank)


def lines_of(*sources):
    return list(merged(sources, {each.node for each in sources}, node_of))


def texts(*sources):
    return [(line.time, line.text) for line in lines_of(*sources)]


def test_lines_of_several_tasks_come_by_time():
    first = Source("4", 0, "stdout", [("01", "[rank 0] a"), ("04", "[rank 1] b")])
    second = Source("4-worker-0", 1, "stderr", [("02", "[rank 2] c"), ("03", "step 🙂")])
    found = lines_of(first, second)
    assert found == [
        Line("01", "4", "stdout", 0, 0, "[rank 0] a"),
        Line("02", "4-worker-0", "stderr", 1, 2, "[rank 2] c"),
        Line("03", "4-worker-0", "stderr", 1, None, "step 🙂"),
        Line("04", "4", "stdout", 0, 1, "[rank 1] b"),
    ]
    assert [line.labelled for line in found[1:3]] == ["[rank 2] c", "[node 1] step 🙂"]


def test_lines_of_one_task_stay_in_order_when_its_clock_goes_back():
    jumping = Source("4", 0, "stdout", [("05", "first"), ("02", "second"), ("06", "third")])
    other = Source("5", 1, "stdout", [("03", "other")])
    assert texts(jumping, other) == [("03", "other"), ("05", "first"), ("05", "second"), ("06", "third")]


@pytest.mark.parametrize(
    ("text", "node", "rank"),
    [
        ("[rank 3] x", 1, 3),
        ("[torchrun node 1] y", 1, None),
        ("z", None, None),
        ("[rank 9] w", None, 9),
        ("[node 1 before_run 1/2] v", 1, None),
        ("[node 1] u", None, None),
        ("[torchrun] of a single node", 0, None),
        ("[before_run 1/2] of a single node", 0, None),
    ],
)
def test_on_a_local_run_labels_tell_the_node_of_what_stands_in_one_log(text, node, rank):
    assert lines_of(Source("4", 0, "stdout", [("01", text)])) == [Line("01", "4", "stdout", node, rank, text)]


def test_copies_of_the_lines_of_a_node_that_has_a_log_of_its_own_are_left_out():
    control = Source("4", 0, "stdout", [("02", "[rank 2] copy"), ("05", "[rank 2] in the control node's log alone")])
    killed = Source("4-worker-0", 1, "stdout", [("01", "[rank 2] copy")])
    assert texts(control, killed) == [("01", "[rank 2] copy")]
