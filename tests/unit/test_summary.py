"""What has become of a gang, made of its records."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.history import Record
from metaflow_extensions.torchrun.plugins.torchrun.gang.texts import duration
from metaflow_extensions.torchrun.plugins.torchrun.records.summary import summarize


def made(*records, num_nodes=2, nproc=2, until_s=None):
    """Return the summary of records, each a kind, its seconds, and what else is in it."""
    whole = [Record(kind, float(at_s), 1000.0 + at_s, **facts) for kind, at_s, facts in records]
    found = summarize(whole, num_nodes, nproc, until_s)
    seconds = found.seconds if not found.is_over else whole[-1].at_s
    for node in found.nodes:  # the times of a node leave no gap
        ends = [0.0, *(span.end_s for span in node.spans)]
        assert [span.begin_s for span in node.spans] == ends[:-1]
        assert found.is_over or node.state in ("left", "lost") or ends[-1] == seconds
    return found


def on_all(kind, at_s, num_nodes=2, **facts):
    return [(kind, at_s, {"node": node, **facts}) for node in range(num_nodes)]


HERE = {"launch": 0, "generation": 0}
JOINED = [("joined", 1, {"node": 0, "text": "a"}), ("joined", 2, {"node": 1, "text": "b"})]
READY = [*JOINED, *on_all("ready", 3, launch=0)]
GO = [*READY, ("go", 4, HERE)]
BEFORE = [*JOINED, *on_all("before_run", 3, launch=0)]
RUNNING = [*GO, *on_all("output", 5, **HERE)]
BAD = {"node": 1, "rank": 2, "exit_code": 1, "text": "Rank 2 on node 1 (host b) failed with ValueError: no", **HERE}
STOPPED = [
    *RUNNING,
    ("stopping", 8, {"text": BAD["text"], **HERE}),
    *(("exited", 9, {"node": 0, "rank": rank, "exit_code": -15, **HERE}) for rank in (0, 1)),
    ("stopped", 9, {"node": 0, **HERE}),
    ("exited", 10, {"node": 1, "rank": 2, "exit_code": 1, **HERE}),
    ("exited", 10, {"node": 1, "rank": 3, "exit_code": -9, **HERE}),
    ("stopped", 10, {"node": 1, **HERE}),
    ("cause", 10, BAD),
]
FAILED = [*STOPPED, ("failed", 10, {"text": BAD["text"], **HERE})]
AGAIN = [*STOPPED, ("restart", 10, {"text": "restart 1 of 3 in 1 s", **HERE}), ("go", 11, {**HERE, "generation": 1})]
DONE = [
    *RUNNING,
    *(("exited", 20, {"node": rank // 2, "rank": rank, "exit_code": 0, **HERE}) for rank in range(4)),
    *on_all("stopped", 20, **HERE),
    ("done", 20, HERE),
]
LEFT = [*on_all("finished", 21), ("left", 22, {"node": 1}), ("left", 23, {"node": 0})]


@pytest.mark.parametrize(
    ("records", "outcome", "sentence"),
    [
        ([], "waiting", "0 of 2 nodes have joined; not joined yet: nodes 0, 1."),
        (JOINED[:1], "waiting", "1 of 2 nodes have joined; not joined yet: node 1."),
        (JOINED, "waiting", "2 nodes joined; the step's code runs."),
        (BEFORE, "running", "The commands of before_run run on nodes 0, 1."),
        ([*BEFORE, ("ready", 6, {"node": 0, "launch": 0})], "running", "The commands of before_run run on node 1."),
        (
            [
                *BEFORE,
                ("command", 6, {"node": 1, "launch": 0, "exit_code": 2}),
                ("command", 7, {"node": 0, "exit_code": 0}),
            ],
            "waiting",
            "before_run has failed on node 1; the launch ends when all nodes have called run.",
        ),
        ([*BEFORE, ("failed", 9, {"text": "Node 1 failed", **HERE})], "failed", "Failed after 9 s: Node 1 failed."),
        (READY[:-1], "waiting", "1 of 2 nodes have called run; still in the step's code: node 1."),
        (RUNNING, "running", "4 ranks on 2 nodes have trained 1 s, with start 5 s."),
        (STOPPED[:8], "stopping", f"All nodes are told to stop: {BAD['text']}."),
        (AGAIN[:-1], "restarting", f"All workers start again (restart 1 of 3 in 1 s): {BAD['text']}."),
        (GO, "starting", "4 ranks on 2 nodes are starting, for 0 s."),
        (AGAIN, "starting", "4 ranks on 2 nodes are starting, for 0 s, after 1 restart."),
        (FAILED, "failed", f"Failed (trained 6 s): {BAD['text']}."),
        ([*FAILED, *LEFT], "done", f"The step has ended well, though launch 0 had failed: {BAD['text']}."),
        (
            [*FAILED, *(("left", 11, {"node": node, "text": "its step has failed"}) for node in (1, 0))],
            "failed",
            f"Failed (trained 6 s, with start 11 s): {BAD['text']}.",
        ),
        (DONE, "done", "4 ranks on 2 nodes have ended well: trained 16 s."),
        ([*DONE, *LEFT], "done", "4 ranks on 2 nodes have ended well: trained 16 s, with start 21 s."),
        ([*DONE, ("broken", 21, {"text": "node 1 is gone"})], "failed", "Failed (trained 17 s): node 1 is gone."),
        ([*JOINED, ("broken", 3, {"text": "x failed."})], "failed", "Failed after 3 s: x failed."),
        ([*FAILED, ("broken", 10, {"text": BAD["text"]})], "failed", f"Failed (trained 6 s): {BAD['text']}."),
    ],
)
def test_the_outcome_is_one_sentence(records, outcome, sentence):
    found = made(*records)
    assert (found.outcome, found.sentence) == (outcome, sentence)


def test_each_rank_has_ended_in_its_own_way():
    ranks = made(*FAILED).ranks
    assert [(rank.node, rank.state, rank.exit_code) for rank in ranks] == [
        (0, "stopped", -15),
        (0, "stopped", -15),
        (1, "failed", 1),
        (1, "stopped", -9),
    ]
    killed = [
        (kind, at_s, {**facts, "exit_code": -9} if facts.get("rank") == 2 else facts) for kind, at_s, facts in FAILED
    ]
    assert [rank.state for rank in made(*killed).ranks] == ["stopped", "stopped", "failed", "stopped"]


@pytest.mark.parametrize(
    ("records", "states"),
    [
        (READY, ["waiting"] * 4),
        ([*GO, ("output", 5, {"node": 1, **HERE})], ["starting", "starting", "running", "running"]),
        ([*GO, *on_all("started", 5, **HERE)], ["starting"] * 4),
        ([*GO, *on_all("started", 5, **HERE), ("output", 6, {"node": 0, **HERE})], ["running"] * 4),
        (
            [*GO, ("exited", 6, {"node": 0, "rank": 0, "exit_code": 0, **HERE})],
            ["done", "running", "starting", "starting"],
        ),
        (STOPPED[:8], ["stopping"] * 4),
        (AGAIN, ["starting"] * 4),
        (AGAIN[:-1], ["stopped", "stopped", "failed", "stopped"]),
        ([*RUNNING, ("lost", 6, {"node": 1})], ["running", "running", "lost", "lost"]),
        ([*DONE, *LEFT], ["done"] * 4),
        ([*DONE, *on_all("ready", 30, launch=1)], ["waiting"] * 4),
    ],
)
def test_a_rank_is_as_its_node_until_it_ends(records, states):
    assert [rank.state for rank in made(*records).ranks] == states


def test_every_node_has_its_times():
    spans = [[(span.state, span.begin_s, span.end_s) for span in node.spans] for node in made(*AGAIN, until_s=12).nodes]
    assert spans[1] == [
        ("not joined yet", 0, 2),
        ("step code", 2, 3),
        ("waiting", 3, 4),
        ("starting", 4, 5),
        ("running", 5, 8),
        ("stopping", 8, 10),
        ("restarting", 10, 11),
        ("starting", 11, 12),
    ]
    assert ("stopped", 9, 10) in spans[0]
    assert [node.host for node in made(*AGAIN).nodes] == ["a", "b"]


def test_the_gang_is_over_when_the_control_node_has_left():
    assert not made(*DONE, *LEFT[:-1]).is_over
    found = made(*DONE, *LEFT)
    assert found.is_over
    assert [node.state for node in found.nodes] == ["left", "left"]


def test_records_of_other_nodes_and_of_later_versions_do_no_harm():
    found = made(*RUNNING, ("joined", 6, {"node": 7}), ("of a later version", 7, {}))
    assert found.outcome == "running"
    assert made(*JOINED, nproc=None).ranks == ()


def test_of_the_time_of_records_that_are_left_out_nothing_is_told():
    told = [*RUNNING, ("omitted", 8, {"text": "3 records are left out here"}), ("done", 9, HERE)]
    records = [Record(kind, float(at_s), 1000.0 + at_s, **facts) for kind, at_s, facts in told]
    for node in summarize(records, 2, 2, 12.0).nodes:
        spans = [(span.state, span.begin_s, span.end_s) for span in node.spans]
        assert spans[-3:] == [("starting", 4, 5), ("running", 8, 9), ("step code", 9, 12)]


def test_seconds_are_told_for_people():
    told = ["0 s", "0 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"]
    assert [duration(seconds) for seconds in (-1, 0.4, 59.6, 200, 7500)] == told


def test_what_metaflow_stores_and_makes_after_the_steps_end_is_no_part_of_the_times():
    found = made(*DONE, *on_all("finished", 21), ("left", 22, {"node": 1}), until_s=50)
    over = made(*DONE, *on_all("finished", 21), ("left", 22, {"node": 1}), ("left", 50, {"node": 0}))
    for each in (found, over):
        assert (each.seconds, each.trained_s) == (21, 16)
        assert {max(span.end_s for span in node.spans) for node in each.nodes} == {21}
    assert found.sentence == over.sentence
    one = made(*DONE, ("finished", 21, {"node": 0}), until_s=50)
    assert (one.seconds, one.sentence) == (50, "4 ranks on 2 nodes have ended well: trained 16 s.")


def test_a_feature_that_hears_of_a_rank_shows_that_the_workers_live():
    started = [*GO, *on_all("started", 5, **HERE)]
    assert [node.state for node in made(*started).nodes] == ["starting", "starting"]
    told = made(*started, ("progress", 6, {"node": 0, "rank": 0, "text": "step 1", **HERE}))
    assert [node.state for node in told.nodes] == ["running", "running"]
