"""Whose each line of the tasks' logs is, and how the logs of many nodes become one."""

from datetime import datetime, timezone

import pytest
from gang_views import BEGAN, Story

from metaflow_extensions.torchrun.plugins.torchrun.gang.limits import LATE_S
from metaflow_extensions.torchrun.plugins.torchrun.gang.view import Placed
from metaflow_extensions.torchrun.plugins.torchrun.show.stored_logs import LogLine, Places, Source, merged

# Two ranks on each of two nodes since 1970.
PLACES = Places([Placed(0.0, (0, 1), 2)])


def lines_of(*sources, places=PLACES, lost=()):
    return list(merged(sources, places, lost))


def test_lines_of_several_tasks_come_by_time():
    first = Source("4", 0, "stdout", [("01", "[rank 0] a"), ("04", "[rank 1] b")])
    second = Source("4-worker-0", 1, "stderr", [("02", "[rank 2] c"), ("03", "step 🙂")])
    found = lines_of(first, second)
    assert found == [
        LogLine("01", "4", "stdout", 0, 0, "[rank 0] a"),
        LogLine("02", "4-worker-0", "stderr", 1, 2, "[rank 2] c"),
        LogLine("03", "4-worker-0", "stderr", 1, None, "step 🙂"),
        LogLine("04", "4", "stdout", 0, 1, "[rank 1] b"),
    ]
    assert [line.labelled for line in found[1:3]] == ["[rank 2] c", "[node 1] step 🙂"]


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
    assert lines_of(Source("4", 0, "stdout", [("01", text)])) == [LogLine("01", "4", "stdout", node, rank, text)]


def test_a_nodes_own_log_is_shown_whole_whatever_its_labels_say():
    own = [("01", "[rank 0] of a gang of its own"), ("02", "[torchrun] launch 0 has ended well"), ("03", "[rank 9] x")]
    control = Source("4", 0, "stdout", [("01", "[torchrun] its own"), ("02", "[rank 0] its own")])
    found = lines_of(control, Source("5", 1, "stdout", own))
    assert [(line.time, line.text) for line in found if line.task == "5"] == own
    assert [line.node for line in found] == [0, 1, 0, 1, 1]


def second(at_s, text):
    """Return a line that was captured so many seconds after the year 1970 began."""
    return (datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f"), text)


def is_shown(places, at_s, text, nodes=(0, 1, 2)):
    """Return whether a line of the control task's log is shown, beside the logs of `nodes`."""
    others = [Source("5", node, "stdout", []) for node in nodes if node > 0]
    return bool(lines_of(Source("4", 0, "stdout", [second(at_s, text)]), *others, places=places))


@pytest.mark.parametrize(
    ("has_log", "is_lost", "shown"), [(True, False, "ab"), (True, True, "aabbc"), (False, False, "abc")]
)
def test_copies_are_shown_where_a_nodes_own_log_may_lack_lines(has_log, is_lost, shown):
    """Rather twice than not at all."""
    copies = [("02", "[rank 2] a"), ("03", "[torchrun node 1] b"), ("04", "[rank 3] c")]
    control = Source("4", 0, "stdout", [("01", "[rank 0] x"), *copies])
    own = [Source("5", 1, "stdout", copies[:2])] if has_log else []
    found = lines_of(control, *own, Source("6", 2, "stdout", []), lost={1} if is_lost else ())
    assert "".join(line.text[-1] for line in found) == f"x{shown}"


def test_a_line_belongs_to_the_node_that_had_its_rank_at_that_time():
    """Node 2, a spare, takes node 1's place at 100 s; for some seconds lines of both may come."""
    places = Places([Placed(5.0, (0, 1), 2), Placed(100.0, (0, 2), 2)])
    assert [places.nodes_at(2, second(at, "")[0])[-1] for at in (1, 50, 99, 100, 500)] == [1, 1, 1, 2, 2]
    shown = [is_shown(places, at, "[rank 2] x", nodes=(0, 2)) for at in (50, 101, 101 + LATE_S)]
    assert shown == [True, True, False], "node 1 has no log of its own"


def test_what_other_code_prints_after_a_launch_is_no_copy():
    places = Places(Story().launched().at(20).ended().view.placed)  # from 2 s on
    shown = [is_shown(places, BEGAN + at_s, "[rank 2] x", nodes=(0, 1)) for at_s in (10, 21, 20.1 + LATE_S)]
    assert shown == [False, False, True]
