"""What a member knows of itself, from its messages, and what its card makes of it."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, WorkerFailed
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Happened, Keeper, Keepers, Remarks
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import (
    Abort,
    Done,
    Ended,
    Go,
    Leave,
    Ready,
    Restart,
    Started,
    Stop,
    Told,
    Verdict,
    Wrote,
)
from metaflow_extensions.torchrun.plugins.torchrun.records.node_records import NodeRecords
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import Snapshot

CONTROL = "1/train/2"
OWN = Cause("exception", 3, "host-3", 7, 1, 1, "ValueError: no", "Traceback: here")
OTHER = Cause("exception", 1, "host-1", 2, 0, 1, "KeyError: 'x'", "Traceback: there")
GO = Go(0, 0, 29500, "gang", 0, 1)
RUNNING = (Ready(0, 2, "digest", {"torch": "2.9"}), GO, Wrote(0, 0))
ENDED = Ended(0, True, 0, exit_codes={6: 0, 7: 0})


def node_3(*messages, keepers=None):
    """Return the records of node 3 of a gang of 4 x 2 after these messages, a second apart."""
    clock = iter(range(1000))
    about = {"control": CONTROL, "of_nodes": 4, "command": "torchrun x"}
    records = NodeRecords(3, about, lambda: float(next(clock)), keepers)
    records.joined("host-3")
    for message in messages:
        records.handle(message)
    return records


def seen(*messages):
    return node_3(*messages).snapshot().summary


def states(summary):
    return [(rank.rank, rank.node, rank.state, rank.exit_code) for rank in summary.ranks]


def test_a_node_that_runs_knows_its_own_ranks():
    assert seen().sentence == "Node 3: own code."
    assert seen(RUNNING[0]).sentence == "Node 3: waiting."
    assert [rank.state for rank in seen(*RUNNING[:2]).ranks] == ["starting", "starting"]
    assert [rank.state for rank in seen(*RUNNING[:2], Started(0, 0)).ranks] == ["running", "running"]
    summary = seen(*RUNNING)
    assert states(summary) == [(6, 3, "running", None), (7, 3, "running", None)]
    assert (summary.outcome, summary.nodes[0].index, summary.nodes[0].host) == ("running", 3, "host-3")
    assert summary.sentence.startswith("2 ranks on node 3 run for ")


def test_a_node_that_runs_commands_knows_them():
    messages = (Ready(0, 2, "digest", runs="before_run"), GO)
    summary = seen(*messages)
    assert summary.sentence.startswith("The commands of before_run run for ")
    assert [rank.state for rank in summary.ranks] == ["waiting", "waiting"]
    assert seen(*messages, Ended(0, True, 0), Verdict(0), *RUNNING).outcome == "running"


def test_what_a_feature_has_seen_happen_is_a_record_of_the_node():
    class Records(Keeper):
        def handle(self, node, told, at_s):
            return Remarks(happened=(Happened("command", node, told.data["text"], exit_code=0, seconds=0.5),))

    records = NodeRecords(3, {}, keepers=Keepers({"before_run": Records()}))
    records.handle(Told(1, 2, "before_run", {"text": "größe"}))
    (record,) = records.snapshot().events
    assert (record.kind, record.node, record.launch, record.generation) == ("command", 3, 1, 2)
    assert (record.text, record.exit_code, record.seconds) == ("größe", 0, 0.5)


def test_a_node_that_has_ended_well():
    summary = seen(*RUNNING, ENDED, Verdict(0), Done(), Leave())
    assert states(summary) == [(6, 3, "done", 0), (7, 3, "done", 0)]
    assert (summary.outcome, summary.is_over) == ("done", True)
    assert "2 ranks on node 3 have ended well after" in summary.sentence


def test_its_own_rank_is_the_cause():
    ended = Ended(0, False, 0, exit_codes={6: -15, 7: 1})
    error = WorkerFailed("Rank 7 on node 3 failed.\nTraceback", OWN.as_dict())
    records = node_3(*RUNNING, Stop(0, 0, "rank 7 failed"), ended, Verdict(0, error), Leave(failed=True))
    summary = records.snapshot().summary
    assert states(summary) == [(6, 3, "stopped", -15), (7, 3, "failed", 1)]
    assert "Rank 7 on node 3 (host host-3)" in summary.sentence
    assert records.snapshot().cause["detail"] == "Traceback: here"
    before = records.count
    records.failed(error)
    assert records.count == before, "the gang has said so already"


def test_a_rank_of_another_node_is_the_cause():
    ended = Ended(0, False, 0, exit_codes={6: -15, 7: -15})
    summary = seen(*RUNNING, Stop(0, 0, "rank 2 failed"), ended, Verdict(0, WorkerFailed("no", OTHER.as_dict())))
    assert [state for _, _, state, _ in states(summary)] == ["stopped", "stopped"]
    assert "Rank 2 on node 1 (host host-1)" in summary.sentence


def test_a_restart_is_told_with_its_cause_and_then_its_ranks_run_again():
    ended = Ended(0, False, 0, exit_codes={6: -15, 7: 1})
    before = (*RUNNING, Stop(0, 0, "rank 7 failed"), ended, Restart(0, 1, 1, 1.0, OWN))
    summary = seen(*before)
    assert (summary.outcome, [rank.state for rank in summary.ranks]) == ("restarting", ["stopped", "failed"])
    records = node_3(*before, Go(0, 1, 29500, "gang", 1, 1), Wrote(0, 1))
    assert [rank.state for rank in records.snapshot().summary.ranks] == ["running", "running"]
    (report,) = records.snapshot().reports
    assert (report.error, report.cause["detail"]) == (None, "Traceback: here")


def test_a_launch_after_one_that_failed_has_no_error():
    failed = (*RUNNING, ENDED, Verdict(0, WorkerFailed("no", OTHER.as_dict())))
    records = node_3(*failed, Ready(1, 2, "digest"), Go(1, 0, 29500, "gang", 0, 1))
    known = records.snapshot()
    assert (known.error, known.cause) == (None, None)
    assert known.summary.sentence.startswith("2 ranks on node 3 run")


def test_what_ends_a_node_besides_a_verdict_is_told_once():
    assert "The nodes differ" in seen(Abort(GangError("The nodes differ"))).sentence
    records = node_3(*RUNNING, ENDED, Verdict(0))
    records.failed(ValueError("after run"))
    assert records.snapshot().summary.sentence.endswith("after run.")
    assert records.snapshot().error == "after run"


@pytest.mark.parametrize("cause", [ConnectionError("refused"), "a text", {"node": 1}])
def test_a_users_exception_may_have_a_cause_of_its_own(cause):
    error = ValueError("the feature store is gone")
    error.cause = cause
    records = node_3(*RUNNING, ENDED, Verdict(0))
    records.failed(error)
    assert (records.snapshot().error, records.snapshot().cause) == ("the feature store is gone", None)


def test_a_node_that_has_never_joined_can_say_why():
    records = NodeRecords(3, {"control": CONTROL}, lambda: 0.0)
    records.failed(GangError("can't reach the control node"))
    assert "can't reach the control node" in records.snapshot().summary.sentence


def test_what_is_known_besides_is_in_its_snapshot():
    known = node_3(*RUNNING).snapshot()
    assert (known.node, known.control, known.of_nodes, known.command) == (3, CONTROL, 4, "torchrun x")
    assert {event.node for event in known.events} == {3, None}
    assert Snapshot.read(known.stored()) == known


class Heard(Keeper):
    def __init__(self):
        self.told = []

    def begin(self, launch, policy, at_s):
        self.told.clear()

    def handle(self, node, told, at_s):
        self.told.append([node, told.data, at_s])

    def record(self):
        return {"told": self.told}


def test_it_keeps_what_its_features_tell():
    told = Told(0, 0, "heard", {"a": 1})
    about = node_3(told, *RUNNING, told, keepers=Keepers({"heard": Heard()}))
    ((node, data, at_s),) = about.snapshot().features["heard"]["told"]
    assert (node, data, at_s > 0) == (3, {"a": 1}, True)
