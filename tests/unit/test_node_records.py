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
COMMANDS = (Ready(0, 2, "digest", runs="before_run"), GO)
ENDED = (*RUNNING, Ended(0, True, 0, exit_codes={6: 0, 7: 0}))
STOPPED = (*RUNNING, Stop(0, 0, "a rank failed"), Ended(0, False, 0, exit_codes={6: -15, 7: 1}))
TOLD_TO = (*RUNNING, Stop(0, 0, "a rank failed"), Ended(0, False, 0, exit_codes={6: -15, 7: -15}))
RESTARTING = (*STOPPED, Restart(0, 1, 1, 1.0, OWN))


def failing(cause):
    return Verdict(0, WorkerFailed("Rank 7 failed.\nTraceback", cause.as_dict()))


def node_3(*messages, keepers=None):
    """Return the records of node 3 of a gang of 4 x 2 after these messages, a second apart."""
    clock = iter(range(1000))
    about = {"control": CONTROL, "of_nodes": 4, "command": "torchrun x"}
    records = NodeRecords(3, about, lambda: float(next(clock)), keepers)
    records.joined("host-3")
    for message in messages:
        records.handle(message)
    return records


@pytest.mark.parametrize(
    ("messages", "outcome", "sentence", "ranks"),
    [
        ((), "waiting", "Node 3: step code.", []),
        (RUNNING[:1], "waiting", "Node 3: waiting.", ["waiting"] * 2),
        (RUNNING[:2], "running", "2 ranks on node 3 have run for ", ["starting"] * 2),
        ((*RUNNING[:2], Started(0, 0)), "running", "2 ranks on node 3 have run for ", ["running"] * 2),
        (RUNNING, "running", "2 ranks on node 3 have run for ", ["running"] * 2),
        (TOLD_TO[:-1], "stopping", "All nodes are told to stop: a rank failed.", ["stopping"] * 2),
        (COMMANDS, "running", "The commands of before_run have run for ", ["waiting"] * 2),
        ((*COMMANDS, Ended(0, True, 0), Verdict(0), *RUNNING), "running", "2 ranks on node 3", ["running"] * 2),
        ((*ENDED, Verdict(0), Done(), Leave()), "done", "2 ranks on node 3 have ended well after", ["done"] * 2),
        ((*STOPPED, failing(OWN)), "failed", "Rank 7 on node 3 (host host-3)", ["stopped", "failed"]),
        ((*TOLD_TO, failing(OTHER)), "failed", "Rank 2 on node 1 (host host-1)", ["stopped"] * 2),
        (RESTARTING, "restarting", "restart 1 of 1 in 1 s", ["stopped", "failed"]),
        ((*RESTARTING, Go(0, 1, 29500, "gang", 1, 1), Wrote(0, 1)), "running", ", after 1 restart", ["running"] * 2),
        ((Abort(GangError("The nodes differ")),), "failed", "The nodes differ", []),
    ],
)
def test_a_node_knows_its_own_ranks_and_what_becomes_of_the_gang(messages, outcome, sentence, ranks):
    records = node_3(*messages)
    summary = records.snapshot().summary
    assert (summary.outcome, sentence in summary.sentence) == (outcome, True), summary.sentence
    assert [rank.state for rank in summary.ranks] == ranks
    assert [rank.rank for rank in summary.ranks] in ([], [6, 7])
    assert (summary.nodes[0].index, summary.nodes[0].host) == (3, "host-3")
    assert summary.is_over is (Leave() in messages)


def test_an_error_of_the_gang_and_a_restart_leave_a_report():
    records = node_3(*RESTARTING, Go(0, 1, 29500, "gang", 1, 1), *STOPPED[2:], failing(OWN), Leave(failed=True))
    known = records.snapshot()
    assert [(each.error, each.cause["detail"]) for each in known.reports] == [
        (None, "Traceback: here"),
        ("WorkerFailed", "Traceback: here"),
    ]
    assert (known.error, known.cause["rank"], known.summary.nodes[0].word) == ("Rank 7 failed.\nTraceback", 7, "failed")
    before = records.count
    records.failed(ValueError("after that"))
    assert records.count == before, "the gang has said so already"


def test_a_launch_after_one_that_failed_has_no_error():
    known = node_3(*STOPPED, failing(OTHER), Ready(1, 2, "digest"), Go(1, 0, 29500, "gang", 0, 1)).snapshot()
    assert (known.error, known.cause, known.nproc_per_node) == (None, None, 2)
    assert known.summary.sentence.startswith("2 ranks on node 3 have run")


@pytest.mark.parametrize("cause", [ConnectionError("refused"), "a text", {"node": 1}])
def test_a_users_exception_ends_the_node_and_may_have_a_cause_of_its_own(cause):
    error = ValueError("the feature store is gone")
    error.cause = cause
    records = node_3(*ENDED, Verdict(0))
    records.failed(error)
    known = records.snapshot()
    assert (known.error, known.cause) == ("the feature store is gone", None)
    assert known.summary.sentence.endswith("the feature store is gone.")


def test_a_node_that_has_never_joined_can_say_why():
    records = NodeRecords(3, {"control": CONTROL}, lambda: 0.0)
    records.failed(GangError("can't reach the control node"))
    assert "can't reach the control node" in records.snapshot().summary.sentence


def test_what_is_known_besides_is_in_its_snapshot():
    known = node_3(*RUNNING).snapshot()
    assert (known.node, known.control, known.of_nodes, known.command) == (3, CONTROL, 4, "torchrun x")
    assert (known.facts, {event.node for event in known.events}) == ({"torch": "2.9"}, {3, None})
    assert Snapshot.read(known.stored()) == known


class Heard(Keeper):
    def __init__(self):
        self.told = []

    def begin(self, launch, policy, at_s):
        self.told.clear()

    def handle(self, node, told, at_s):
        self.told.append([node, told.data, at_s])
        return Remarks(happened=(Happened("command", node, told.data["text"], exit_code=0, seconds=0.5),))

    def record(self):
        return {"told": self.told}


def test_it_keeps_and_records_what_its_features_tell():
    told = Told(1, 2, "heard", {"text": "größe"})
    known = node_3(told, *RUNNING, told, keepers=Keepers({"heard": Heard()})).snapshot()
    ((node, data, at_s),) = known.features["heard"]["told"]
    assert (node, data, at_s > 0) == (3, told.data, True)
    record = known.events[-1]
    assert (record.kind, record.node, record.launch, record.generation) == ("command", 3, 1, 2)
    assert (record.text, record.exit_code, record.seconds) == ("größe", 0, 0.5)
