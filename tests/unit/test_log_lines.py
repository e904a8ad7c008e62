"""Whose each line of the tasks' logs is, and how the logs of many nodes become one."""

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from gang_of import running
from test_budget import fail

from metaflow_extensions.torchrun.plugins.torchrun.gang.history import omitted
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.records.placement import LATE_S, Placed, Placement
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import snapshot_of
from metaflow_extensions.torchrun.plugins.torchrun.show.stored_logs import Line, Source, merged

# Two ranks on each of two nodes since 1970.
PLACES = Placement([Placed(0.0, (0, 1), 2)])


def lines_of(*sources, places=PLACES, lost=None):
    return list(merged(sources, {each.node for each in sources}, places, lost or {}))


def texts(*sources, places=PLACES):
    return [(line.time, line.text) for line in lines_of(*sources, places=places)]


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
    copies = [("02", "[rank 2] copy"), ("03", "[torchrun node 1] copy"), ("05", "[rank 2] not in the node's own log")]
    killed = [("01", "[rank 2] copy"), ("02", "[torchrun node 1] copy")]
    assert texts(Source("4", 0, "stdout", copies), Source("5", 1, "stdout", killed)) == killed


def test_a_nodes_own_log_is_shown_whole_whatever_its_labels_say():
    own = [("01", "[rank 0] of a gang of its own"), ("02", "[torchrun] launch 0 has ended well"), ("03", "[rank 9] x")]
    control = Source("4", 0, "stdout", [("01", "[torchrun] its own"), ("02", "[rank 0] its own")])
    found = lines_of(control, Source("5", 1, "stdout", own))
    assert [(line.time, line.text) for line in found if line.task == "5"] == own
    assert [line.node for line in found] == [0, 1, 0, 1, 1]


def second(at_s, text):
    """Return a line that was captured so many seconds after the year 1970 began."""
    return (f"1970-01-01T00:{int(at_s) // 60:02}:{at_s % 60:09.6f}", text)


def is_shown(places, at_s, text, nodes=(0, 1, 2)):
    """Return whether a line of the control task's log is shown, beside the logs of `nodes`."""
    source = Source("4", 0, "stdout", [second(at_s, text)])
    return bool(list(merged([source], nodes, places, {})))


def test_copies_that_a_lost_nodes_log_lacks_are_shown():
    own = ["[rank 2] a", "[rank 2] a", "[torchrun node 1] b"]
    copies = ["[rank 2] a", "[torchrun node 1] b", "[rank 2] a", "[rank 2] a", "[rank 2] c"]
    control = Source("4", 0, "stdout", [(f"{at:02}", text) for at, text in enumerate(copies)])
    lost = Source("5", 1, "stdout", [(f"{at:02}", text) for at, text in enumerate(own)])
    found = lines_of(control, lost, lost={1: Counter(map(hash, own))})
    assert sorted(line.text for line in found) == sorted([*own, "[rank 2] a", "[rank 2] c"])


def test_a_line_belongs_to_the_node_that_had_its_rank_at_that_time():
    """Node 2, a spare, takes node 1's place at 100 s; for some seconds lines of both may come."""
    places = Placement([Placed(5.0, (0, 1), 2), Placed(100.0, (0, 2), 2)])
    assert [places.node_at(2, second(at, "")[0]) for at in (1, 50, 99, 100, 500)] == [1, 1, 1, 2, 2]
    shown = [is_shown(places, at, "[rank 2] x", nodes=(0, 2)) for at in (50, 101, 101 + LATE_S)]
    assert shown == [True, True, False], "node 1 has no log of its own"
    assert places.nodes_of(2) == {1, 2}
    assert (places.nodes_of(1), places.nodes_of(4)) == ({0}, set())


def test_all_places_of_the_last_seconds_count():
    """Launches of other sizes follow each other; the line may be of the one between."""
    places = Placement([Placed(0.0, (0, 1), 1), Placed(100.0, (0, 1), 4), Placed(105.0, (0, 1), 1)])
    shown = [is_shown(places, at, "[rank 1] x") for at in (50, 105.2, 110.2, 116)]
    assert shown == [False, True, True, False]


def test_what_other_code_prints_after_a_launch_is_no_copy():
    gang = running(2)
    gang.pass_time(20)
    gang.all_ended()
    snapshot = snapshot_of(gang.state)
    began = datetime.fromtimestamp(snapshot.events[0].time, timezone.utc).replace(tzinfo=None)
    shown = []
    for after_s in (10, 21, 20.1 + LATE_S):
        line = ((began + timedelta(seconds=after_s)).isoformat(), "[rank 2] x")
        shown += lines_of(
            Source("4", 0, "stdout", [line]), Source("5", 1, "stdout", []), places=snapshot.summary.placement
        )
    assert [line.time for line in shown] == [line[0]], "the last one only"


def test_lines_of_a_lost_node_are_shown_though_its_ranks_are_elsewhere_now():
    gang = running(3, max_restarts=1, spare_nodes=1)
    gang.lost(1)  # of ranks 2 and 3
    gang.stop(0)
    gang.pass_time(31)
    assert gang.groups()[-1] == (0, 2)
    lost = [("01", "[rank 2] before"), ("02", "[rank 3] ValueError")]
    places = snapshot_of(gang.state).summary.placement
    sources = [Source("4", 0, "stdout", [("00", "[rank 0] x")]), Source("5", 1, "stderr", lost)]
    found = lines_of(*sources, Source("6", 2, "stdout", [("09", "[rank 2] after")]), places=places)
    assert [(line.node, line.text) for line in found] == [
        (0, "[rank 0] x"),
        (1, "[rank 2] before"),
        (1, "[rank 3] ValueError"),
        (2, "[rank 2] after"),
    ]


def test_a_task_in_the_place_of_a_lost_node_does_not_make_a_training_launch_wait():
    gang = running(3, max_restarts=1, spare_nodes=1, replaces=True)
    gang.lost(1)
    gang.stop(0)
    gang.pass_time(31)
    for node in (0, 2):
        gang.say(node, Report("started", 0, 1))
        gang.say(node, Report("wrote", 0, 1))
    gang.come(1)
    gang.ready(1)
    summary = snapshot_of(gang.state).summary
    assert (summary.outcome, summary.sentence[:18]) == ("running", "4 ranks on 2 nodes")
    assert [node.state for node in summary.nodes] == ["running", "waiting", "running"]


def test_who_takes_part_is_known_though_records_were_dropped():
    """Those of the loss are among them; *go* has the group."""
    gang = running(3, max_restarts=1, spare_nodes=1)
    gang.lost(1)
    gang.stop(0)
    gang.pass_time(31)
    for node in (0, 2):
        gang.ended(node, exit_codes={0: 0, 1: 0} if node == 0 else {2: 0, 3: 0})
    known = snapshot_of(gang.state)
    last_go = max(place for place, each in enumerate(known.events) if each.kind == "go")
    dropped = omitted(last_go - 3, known.events[last_go])
    summary = replace(known, events=(*known.events[:3], dropped, *known.events[last_go:])).summary
    assert [(rank.rank, rank.node, rank.state) for rank in summary.ranks] == [
        (0, 0, "done"),
        (1, 0, "done"),
        (2, 2, "done"),
        (3, 2, "done"),
    ]


def test_where_starts_are_missing_in_the_record_all_lines_are_shown():
    gang = running(2, max_restarts=9)
    for _ in range(3):
        fail(gang)
    known = snapshot_of(gang.state)
    events = [each for each in known.events if (each.kind, each.generation) != ("go", 1)]
    began = {each.generation: each.time for each in events if each.kind == "go"}
    places = replace(known, events=tuple(events)).summary.placement
    stamps = [datetime.fromtimestamp(began[each] + 1, timezone.utc).isoformat() for each in (0, 2, 3)]
    assert [places.node_at(2, stamp) for stamp in stamps] == [None, 1, 1]
