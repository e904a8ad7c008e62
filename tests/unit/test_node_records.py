"""What a member knows of itself, from its messages, and what its card makes of it."""

from metaflow_extensions.torchrun.plugins.torchrun.card.page import layout, parts
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, WorkerFailed
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Keeper, Keepers
from metaflow_extensions.torchrun.plugins.torchrun.gang.node_records import NodeRecords
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import (
    COMMANDS,
    Abort,
    Active,
    Done,
    Ended,
    Go,
    Leave,
    Ran,
    Ready,
    Restart,
    Started,
    Stop,
    Told,
    Verdict,
)
from metaflow_extensions.torchrun.plugins.torchrun.records.summary import from_stored

CONTROL = "1/train/2"
OWN = Cause("exception", 3, "host-3", 7, 1, 1, "ValueError: no", "Traceback: here")
OTHER = Cause("exception", 1, "host-1", 2, 0, 1, "KeyError: 'x'", "Traceback: there")
GO = Go(0, 0, 29500, "gang", 0, 1)
RUNNING = (Ready(0, 2, "digest", {"torch": "2.9"}), GO, Active(0, 0, 0.0), Active(0, 0, 0.0, first_output=True))
USAGE = {"step_s": 5.0, "nodes": {"3": {"of": "processes", "limits": {}, "cpus": [1.0, 2.0]}}}
ENDED = Ended(0, True, 0, exit_codes={6: 0, 7: 0})


def node_3(*messages, keepers=None):
    """Return the records of node 3 of a gang of 4 x 2 after these messages, a second apart."""
    clock = iter(range(1000))
    about = {"control": CONTROL, "of_nodes": 4, "command": "torchrun x"}
    records = NodeRecords(3, about, lambda: float(next(clock)), keepers)
    records.joined("host-3")
    for message in messages:
        records.take(message)
    return records


def seen(*messages):
    return from_stored(node_3(*messages).content())


def states(summary):
    return [(rank.rank, rank.node, rank.state, rank.exit_code) for rank in summary.ranks]


def test_a_node_that_runs_knows_its_own_ranks():
    assert seen().sentence == "Node 3 has joined; its own code runs."
    assert seen(RUNNING[0]).sentence == "Node 3 waits until all nodes have called run."
    assert [rank.state for rank in seen(*RUNNING[:3]).ranks] == ["starting", "starting"]
    assert [rank.state for rank in seen(*RUNNING[:2], Started(0, 0)).ranks] == ["running", "running"]
    summary = seen(*RUNNING)
    assert states(summary) == [(6, 3, "running", None), (7, 3, "running", None)]
    assert (summary.outcome, summary.nodes[0].index, summary.nodes[0].host) == ("running", 3, "host-3")
    assert summary.sentence.startswith("2 ranks on node 3 run for ")


def test_a_node_that_runs_commands_knows_them():
    messages = (Ready(0, 2, "digest", runs=COMMANDS), GO, Ran(0, 0, "before_run 1/1 (make) exited with code 0", 0.5, 0))
    summary = seen(*messages)
    assert summary.sentence.startswith("The commands of before_run run for ")
    assert [rank.state for rank in summary.ranks] == ["waiting", "waiting"]
    (told,) = [each for each in node_3(*messages).content()["events"] if each["kind"] == "command"]
    assert (told["text"], told["seconds"]) == ("before_run 1/1 (make) exited with code 0", 0.5)
    assert seen(*messages, Ended(0, True, 0), Verdict(0), *RUNNING).outcome == "running"


def test_a_node_that_has_ended_well():
    summary = seen(*RUNNING, ENDED, Verdict(0), Done(), Leave())
    assert states(summary) == [(6, 3, "done", 0), (7, 3, "done", 0)]
    assert (summary.outcome, summary.is_over) == ("done", True)
    assert "2 ranks on node 3 have ended well after" in summary.sentence


def test_its_own_rank_is_the_cause():
    ended = Ended(0, False, 0, exit_codes={6: -15, 7: 1})
    error = WorkerFailed("Rank 7 on node 3 failed.\nTraceback", OWN.as_dict())
    records = node_3(*RUNNING, Stop(0, 0, "rank 7 failed"), ended, Verdict(0, error), Leave(failed=True))
    summary = from_stored(records.content())
    assert states(summary) == [(6, 3, "stopped", -15), (7, 3, "failed", 1)]
    assert "Rank 7 on node 3 (host host-3) failed with ValueError: no." in summary.sentence
    assert records.content()["cause"]["detail"] == "Traceback: here"
    before = records.count
    records.failed(error)
    assert records.count == before, "the gang has said so already"


def test_a_rank_of_another_node_is_the_cause():
    ended = Ended(0, False, 0, exit_codes={6: -15, 7: -15})
    summary = seen(*RUNNING, Stop(0, 0, "rank 2 failed"), ended, Verdict(0, WorkerFailed("no", OTHER.as_dict())))
    assert [state for _, _, state, _ in states(summary)] == ["stopped", "stopped"]
    assert "Rank 2 on node 1 (host host-1) failed with KeyError: 'x'." in summary.sentence


def test_a_restart_is_told_with_its_cause_and_then_its_ranks_run_again():
    ended = Ended(0, False, 0, exit_codes={6: -15, 7: 1})
    before = (*RUNNING, Stop(0, 0, "rank 7 failed"), ended, Restart(0, 1, 1, 1.0, OWN))
    summary = seen(*before)
    assert (summary.outcome, [rank.state for rank in summary.ranks]) == ("restarting", ["stopped", "failed"])
    records = node_3(*before, Go(0, 1, 29500, "gang", 1, 1), Active(0, 1, 0.0, first_output=True))
    assert [rank.state for rank in from_stored(records.content()).ranks] == ["running", "running"]
    (report,) = records.content()["reports"]
    assert (report["error"], report["cause"]["detail"]) == (None, "Traceback: here")


def test_a_launch_after_one_that_failed_has_no_error():
    failed = (*RUNNING, ENDED, Verdict(0, WorkerFailed("no", OTHER.as_dict())))
    records = node_3(*failed, Ready(1, 2, "digest"), Go(1, 0, 29500, "gang", 0, 1))
    content = records.content()
    assert (content["error"], content["cause"]) == (None, None)
    assert from_stored(content).sentence.startswith("2 ranks on node 3 run")


def test_what_ends_a_node_besides_a_verdict_is_told_once():
    assert "The nodes differ" in seen(Abort(GangError("The nodes differ"))).sentence
    records = node_3(*RUNNING, ENDED, Verdict(0))
    records.failed(ValueError("after run"))
    assert from_stored(records.content()).sentence.endswith("after run.")
    assert records.content()["error"] == "after run"


def test_a_node_that_has_never_joined_can_say_why():
    records = NodeRecords(3, {"control": CONTROL}, lambda: 0.0)
    records.failed(GangError("can't reach the control node"))
    assert "can't reach the control node" in from_stored(records.content()).sentence


def shown(*messages, **more):
    return parts({**node_3(*messages).content(), "task": "Flow/1/train/5", **more})


def test_its_card_shows_the_node_and_where_the_gangs_is():
    paces = {"6": {"step": 120, "steps_per_s": 3.2}, "7": {"step": 119, "steps_per_s": None}}
    page = {part["id"]: part for part in shown(*RUNNING, usage=USAGE, progress={"paces": paces})}
    outcome, ranks, times = page["gang-outcome"], page["gang-ranks"], page["gang-times"]
    nodes, facts, progress = page["gang-nodes"], page["gang-facts"], page["gang-progress"]
    assert "2 ranks on node 3 run" in outcome["source"]
    assert "This is node 3. The gang's card is that of the control task, Flow/1/train/2." in outcome["source"]
    assert "rank 6" in ranks["source"]
    assert times["spec"]["encoding"]["y"]["scale"]["domain"] == [3]
    assert times["spec"]["encoding"]["x"]["axis"]["title"] == "seconds since the node's begin"
    assert nodes["data"] == [["3", "host-3", "running", "2 running", "Flow/1/train/5"]]
    assert "<dt>nodes</dt><dd>4</dd>" in facts["source"]
    assert "Command on node 3" in facts["source"]
    (paces,) = progress["contents"]
    assert "<dt>rank 6</dt><dd>step 120, 3.2 steps/s</dd>" in paces["source"]
    assert "<dt>rank 7</dt><dd>step 119</dd>" in paces["source"]
    assert [part["id"] for part in page["gang-usage"]["contents"]] == ["gang-usage-cpus"]
    assert {part["id"]: part for part in shown(*RUNNING)}["gang-progress"]["contents"] == []
    linked = shown(*RUNNING, ui_url="https://ui/")[0]["source"]
    assert '<a href="https://ui/Flow/1/train/2">Flow/1/train/2</a>' in linked
    titles = [
        part.get("title") for part in layout({**node_3(*RUNNING).content(), "task": "Flow/1/train/5"})["contents"]
    ]
    assert "Node" in titles


class Heard(Keeper):
    def __init__(self):
        self.told = []

    def begin(self):
        self.told.clear()

    def take(self, node, told, at_s):
        self.told.append([node, told.data, at_s])

    def record(self):
        return {"told": self.told}


def test_it_keeps_what_its_features_tell():
    told = Told(0, 0, "heard", {"a": 1})
    about = node_3(told, *RUNNING, told, keepers=Keepers({"heard": Heard()}))
    ((node, data, at_s),) = about.content()["heard"]["told"]
    assert (node, data, at_s > 0) == (3, {"a": 1}, True)
