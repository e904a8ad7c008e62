"""Stacks on demand: what the control node asks and answers, what a node finds out, what the command prints."""

import json
import os
import subprocess
import sys

import pytest
from fake_node import FakeNode
from gang_of import running
from limits import limit_s
from unit_helpers import eventually, worker_environment

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.features.stacks import command, watch
from metaflow_extensions.torchrun.plugins.torchrun.features.stacks.command import Shown
from metaflow_extensions.torchrun.plugins.torchrun.features.stacks.keep import StacksKeeper
from metaflow_extensions.torchrun.plugins.torchrun.features.stacks.told import GangStacks, NodeStacks
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Keepers
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Ask, Report
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.machine import stacks
from metaflow_extensions.torchrun.plugins.torchrun.machine.frames import Found
from metaflow_extensions.torchrun.plugins.torchrun.records.requests import Answer, GangHasEnded, Request


def node_stacks(node, line=1):
    where = f"train.py:{line} in step"
    return NodeStacks(
        f"host-{node}", {2 * node + local: Found(where, f"mark{line}", "text", short="short") for local in range(2)}
    )


def told(node, id_="a"):
    return Report("stacks", 0, 0, {"id": id_, "found": to_plain(node_stacks(node))})


def asked_gang(num_nodes=3):
    gang = running(num_nodes, keepers=Keepers.of({"stacks": StacksKeeper}, num_nodes))
    gang.post(gang.state.request("stacks", {"id": "a"}))
    return gang


def answer_of(gang):
    answer = gang.state.keepers.pop_answer("stacks")
    return None if answer is None else (answer["id"], GangStacks.read(answer["found"]))


def test_all_nodes_are_asked_and_the_answer_is_whole_when_all_have_answered():
    gang = asked_gang()
    for node in range(3):
        assert gang.got(node, Ask) == [Ask(0, 0, "stacks", {"id": "a"})]
    gang.say(2, told(2))
    gang.say(0, told(0))
    assert answer_of(gang) is None
    gang.say(1, told(1))
    id_, found = answer_of(gang)
    assert (id_, found.launch, found.generation) == ("a", 0, 0)
    assert sorted(found.ranks) == [0, 1, 2, 3, 4, 5]
    assert answer_of(gang) is None, "an answer is given once"


def test_a_node_that_does_not_answer_holds_up_the_others_for_seconds_only():
    gang = asked_gang()
    gang.say(0, told(0))
    gang.say(1, told(1))
    gang.pass_time(5)
    assert answer_of(gang) is None
    gang.pass_time(5)
    _, found = answer_of(gang)
    assert list(found.missing) == [2]
    gang.say(2, told(2))  # too late
    assert answer_of(gang) is None


def test_a_node_whose_workers_end_meanwhile_is_not_waited_for():
    gang = asked_gang()
    gang.say(0, told(0))
    gang.ended(1)
    gang.ended(2)
    _, found = answer_of(gang)
    assert found.missing == dict.fromkeys((1, 2), "it has no workers")
    gang.post(gang.state.request("stacks", {"id": "b"}))
    gang.ended(0)
    assert answer_of(gang)[1].missing == dict.fromkeys((0, 1, 2), "it has no workers")
    gang.post(gang.state.request("stacks", {"id": "c"}))
    assert answer_of(gang) == ("c", GangStacks()), "no worker runs, and nobody is asked"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_node_that_is_lost_is_not_waited_for(when):
    gang = running(2, keepers=Keepers.of({"stacks": StacksKeeper}, 2))
    if when == "before":
        gang.lost(1)
    gang.post(gang.state.request("stacks", {"id": "a"}))
    if when == "meanwhile":
        gang.lost(1)
    gang.say(0, told(0))
    _, found = answer_of(gang)
    assert list(found.nodes) == [0]
    assert found.missing == {1: "it is no longer in the gang"}
    gang.ended(0, ok=False)
    gang.post(gang.state.request("stacks", {"id": "b"}))
    assert answer_of(gang) == ("b", GangStacks())


# --- a node ------------------------------------------------------------------------------------------

LOOP = "print('ready', flush=True); import time\nwhile True: time.sleep(0.01)"


def test_a_node_asks_its_workers_while_the_launch_goes_on(tmp_path):
    node = FakeNode(tmp_path, watches={"stacks": watch.PART})
    agent = node.running()
    assert agent.env["TORCHRUN_HOOKS"] == stacks.HOOK
    node.seat.deliver(Ask(0, 1, "stacks", {"id": "late"}))  # of another generation
    node.worker_ended(agent, 1, 0)
    node.seat.deliver(Ask(0, 0, "stacks", {"id": "a"}))
    answer = node.report("stacks")
    assert answer["id"] == "a"
    found = answer["found"]["ranks"]
    assert sorted(found) == ["0", "1"]
    assert ("no Python stack" in found["0"]["where"], found["1"]["where"]) == (True, "its process has ended")
    node.ends(agent)


def test_a_worker_can_be_asked_again_and_again(tmp_path):
    env = worker_environment({**os.environ, **stacks.hook_environment(), "TORCHRUN_HOOKS": stacks.HOOK}, tmp_path)
    with subprocess.Popen([sys.executable, "-c", LOOP], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        open_files = [f"/proc/{who}/fd" for who in (process.pid, "self")]
        before = [len(os.listdir(each)) for each in open_files]
        for _ in range(3):
            question = stacks.Question({0: process.pid}, limit_s(5.0))
            found = eventually(question.poll, "its answer")[0]
            assert found.where.startswith("<string>:"), found
            assert len(found.text) < 500, "it does not grow with each question"
        assert [len(os.listdir(each)) for each in open_files] == before
        assert process.poll() is None
        process.kill()


# --- the command -------------------------------------------------------------------------------------


def gang_stacks(lines=(1, 1), generation=0, **more):
    return GangStacks(0, generation, {node: node_stacks(node, line) for node, line in enumerate(lines)}, **more)


def shown(found, before=None):
    former = None if before is None else answer(before, 100.0)
    return Shown.of(answer(found, 112.0), former)


def answer(found, at):
    return Answer(Request(str(at), at, "stacks", {}), at, {"found": to_plain(found)})


def test_ranks_at_one_place_are_named_together_and_each_stack_stands_once():
    found = gang_stacks((1, 7), missing={2: "it has not answered in time"})
    assert shown(found).lines(None, short=False)[1:] == [
        "  ranks 0, 1: train.py:1 in step",
        "  ranks 2, 3: train.py:7 in step",
        "  node 2 has no answer: it has not answered in time",
        *["", "--- rank 0 (node 0, host host-0), and the same in rank 1", "short"],
        *["", "--- rank 2 (node 1, host host-1), and the same in rank 3", "short"],
    ]


def test_an_answer_of_an_older_version_shows_whole_stacks():
    plain = to_plain(gang_stacks())
    for each in (each for node in plain["nodes"].values() for each in node["ranks"].values()):
        for name in ("line", "short", "waits"):
            del each[name]
    lines = Shown.of(Answer(Request("1", 1.0, "stacks", {}), 1.0, {"found": plain}), None).lines(None, short=False)
    assert lines[-1] == "text"


MOVED = ["ranks 0, 1 are at another place than 12 s ago", "ranks 2, 3 are at the same place as 12 s ago"]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (gang_stacks((9, 1)), MOVED),
        (gang_stacks((1, 1), generation=1), []),
        (GangStacks(), []),
        (None, []),
    ],
)
def test_who_has_moved_is_told_where_it_can_be_known(before, said):
    lines = shown(gang_stacks((1, 1)), before).lines(None, short=True)
    moves = [line.strip() for line in lines if line.endswith(" ago")]
    assert moves == said


class AskedGang:
    """A gang that gives the answers of the test, one after another, and then has ended."""

    where = "1/train/2"

    def __init__(self, *answers):
        self.answers = list(answers)

    def last(self):
        return None

    def ask(self, data):
        if not self.answers:
            raise GangHasEnded("it has ended")
        return answer(self.answers.pop(0), 100.0)


@pytest.mark.parametrize("watch", [True, False])
def test_a_gang_is_watched_to_its_end(watch, monkeypatch):
    monkeypatch.setattr(command, "_WATCH_S", 0.0)
    options = {"rank": None, "watch": watch, "json": False}
    lines = list(command.ask_gang(AskedGang(gang_stacks(), GangStacks(0, 0), gang_stacks((1, 7))), options))
    assert sum("Launch 0" in line for line in lines) == (3 if watch else 1)
    assert ("no worker has started yet" in "".join(lines)) is watch
    assert (lines[-1] == "1/train/2 has ended.") is watch
    with pytest.raises(GangHasEnded):
        list(command.ask_gang(AskedGang(), options))
    (line,) = command.ask_gang(AskedGang(GangStacks()), {**options, "watch": False})
    assert "No worker runs" in line


def test_one_rank_is_shown_alone_and_one_that_has_not_answered_is_an_error():
    found = shown(gang_stacks())
    heading, text = found.lines(2, short=True)[-2:]
    assert (heading[:18], text) == ("--- rank 2 (node 1", "text"), "the whole stack"
    options = {"rank": 9, "watch": False, "json": False}
    with pytest.raises(TorchrunError, match=r"Rank 9 has not answered.*0, 1, 2, 3"):
        list(command.ask_gang(AskedGang(gang_stacks()), options))
    assert "Rank 9 has not" in next(command.ask_gang(AskedGang(gang_stacks()), {**options, "watch": True}))
    plain = json.loads(json.dumps(found.data(2)))
    assert [sorted(node["ranks"]) for node in plain["nodes"].values()] == [[], ["2"]]
