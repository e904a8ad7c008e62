"""Whose each line of the tasks' logs is, and how the logs of many nodes become one."""

import re

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.show.log_lines import (
    Line,
    Reader,
    Source,
    shown,
    wanted,
)


def node_of(rank):
    return {0: 0, 1: 0, 2: 1, 3: 1}.get(rank)


def merged(*sources):
    return list(Reader(node_of, {each.node for each in sources}).merged(sources))


def texts(lines):
    return [(line.time, line.text) for line in lines]


def test_lines_of_several_tasks_come_by_time():
    first = Source("4", 0, "stdout", [("01", "[rank 0] a"), ("04", "[rank 1] b")])
    second = Source("4-worker-0", 1, "stderr", [("02", "[rank 2] c"), ("03", "step 🙂")])
    assert merged(first, second) == [
        Line("01", "4", "stdout", 0, 0, "[rank 0] a"),
        Line("02", "4-worker-0", "stderr", 1, 2, "[rank 2] c"),
        Line("03", "4-worker-0", "stderr", 1, None, "step 🙂"),
        Line("04", "4", "stdout", 0, 1, "[rank 1] b"),
    ]


def test_lines_of_one_task_stay_in_order_when_its_clock_goes_back():
    jumping = Source("4", 0, "stdout", [("05", "first"), ("02", "second"), ("06", "third")])
    other = Source("5", 1, "stdout", [("03", "other")])
    assert texts(merged(jumping, other)) == [("03", "other"), ("05", "first"), ("05", "second"), ("06", "third")]


def test_on_a_local_run_labels_tell_the_node_of_what_stands_in_one_log():
    said = ["[rank 3] x", "[torchrun node 1] y", "z", "[rank 9] w", "[node 1 before_run 1/2] v", "[node 1] u"]
    lines = merged(Source("4", 0, "stdout", [(f"0{number}", text) for number, text in enumerate(said)]))
    assert [(line.node, line.rank) for line in lines] == [
        (1, 3),
        (1, None),
        (None, None),
        (None, 9),
        (1, None),
        (None, None),
    ]


def test_copies_of_the_lines_of_a_node_that_has_a_log_of_its_own_are_left_out():
    control = Source(
        "4", 0, "stdout", [("02", "[rank 2] copy"), ("05", "[rank 2] stored in the control node's log alone")]
    )
    killed = Source("4-worker-0", 1, "stdout", [("01", "[rank 2] copy")])
    assert texts(merged(control, killed)) == [("01", "[rank 2] copy")]


LINES = [
    Line("01", "4", "stdout", 0, 0, "[rank 0] loss 1"),
    Line("02", "4", "stdout", 1, 2, "[rank 2] loss 2"),
    Line("03", "4", "stderr", 1, None, "[torchrun node 1] done"),
    Line("04", "4", "stderr", None, None, "loss of a step"),
]


@pytest.mark.parametrize(
    ("asked", "times"),
    [
        ({}, ["01", "02", "03", "04"]),
        ({"rank": 2}, ["02"]),
        ({"node": 1}, ["02", "03"]),
        ({"node": 1, "rank": 0}, []),
        ({"pattern": re.compile(r"loss \d")}, ["01", "02"]),
        ({"node": 1, "pattern": re.compile("loss")}, ["02"]),
    ],
)
def test_only_what_is_wanted_is_kept(asked, times):
    assert [line.time for line in wanted(LINES, **asked)] == times


def test_a_line_says_where_it_comes_from():
    plain = Line("05", "9", "stdout", 3, None, "of the step")
    assert [shown(line, lambda stamp: f"at {stamp}") for line in (*LINES, plain)] == [
        "at 01 [rank 0] loss 1",
        "at 02 [rank 2] loss 2",
        "at 03 [torchrun node 1] done",
        "at 04 loss of a step",
        "at 05 [node 3] of the step",
    ]
