"""Stacks on demand: what the gang asks and answers, what a node finds out, what the command prints."""

import json
import time
from types import SimpleNamespace

import pytest
from gang_of import crash
from gang_views import Story
from metaflow._vendor.click.testing import CliRunner
from metaflow.datastore import FlowDataStore
from metaflow.plugins.datastores.local_storage import LocalStorage
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Ask
from metaflow_extensions.torchrun.plugins.torchrun.gang.questions import HANG
from metaflow_extensions.torchrun.plugins.torchrun.gang.stacks import GangStacks, NodeStacks
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.machine.frames import Found
from metaflow_extensions.torchrun.plugins.torchrun.registry import Registry, Replies, Reply, Request, Requests
from metaflow_extensions.torchrun.plugins.torchrun.show import asking, commands, stacks_command
from metaflow_extensions.torchrun.plugins.torchrun.task.cards import Cards
from metaflow_extensions.torchrun.plugins.torchrun.task.gang_store import GangStore


def node_stacks(node, line=1):
    where, ranks = f"train.py:{line} in step", (2 * node, 2 * node + 1)
    return NodeStacks(f"host-{node}", {rank: Found(where, f"mark{line}", "text", short="short") for rank in ranks})


# --- the gang ----------------------------------------------------------------------------------------


def ask(story, asked="a"):
    story.asked = asked
    return story.post(story.state.ask(asked, "stacks", {}))


def say(story, *nodes):
    for node in nodes:
        story.report("answer", node, id="a", found=to_plain(node_stacks(node)))


def answer_of(story):
    return story.state.answers.pop(story.asked, None)


def test_all_nodes_are_asked_and_the_answer_is_whole_when_all_have_answered():
    story = ask(Story(3).running())
    assert [story.got(node, Ask) for node in range(3)] == [[Ask(0, 0, "a", "stacks")]] * 3
    say(story, 2, 0)
    assert answer_of(story) is None
    say(story, 1)
    found = answer_of(story)
    assert (found.launch, found.generation, sorted(found.ranks)) == (0, 0, [0, 1, 2, 3, 4, 5])


def test_a_spare_is_called_one():
    story = ask(Story(3, spare_nodes=1).running())
    say(story, 0, 1)
    assert answer_of(story).missing == {2: "waits as a spare"}


def test_a_node_that_does_not_answer_holds_up_the_others_for_seconds_only():
    story = ask(Story(3).running())
    say(story, 0, 1)
    assert answer_of(story.at(story.now + 5)) is None
    assert answer_of(story.at(story.now + 5)).missing == {2: "has not answered in time"}


def test_a_node_whose_workers_end_meanwhile_is_not_waited_for():
    story = ask(Story(3).running())
    say(story, 0)
    assert answer_of(story.ended(1).ended(2)).missing == dict.fromkeys((1, 2), "has no workers")
    assert answer_of(ask(story, "b").ended(0)).missing == dict.fromkeys((0, 1, 2), "has no workers")
    assert answer_of(ask(story, "c")) == GangStacks(), "no worker runs, and nobody is asked"


def test_who_asks_in_a_hang_gets_an_answer_of_its_own():
    story = Story(2).running(policy={"hang_timeout_s": 30.0}).report("hangs", age_s=0.0)
    say(ask(story.at(story.now + 31)), 0, 1)
    assert sorted(answer_of(story).ranks) == [0, 1, 2, 3]
    for node in (0, 1):
        story.report("answer", node, id=HANG, found=to_plain(node_stacks(node)))
    assert story.ended(codes=(-9, -9)).state.launch.verdict.cause["kind"] == "hang"


def test_a_rank_that_fails_while_the_stacks_of_a_hang_are_asked_is_the_cause():
    story = Story(2).running(policy={"hang_timeout_s": 30.0}).report("hangs", age_s=0.0)
    story.at(story.now + 31)
    story.failed(crash(1))
    for node in (0, 1):
        story.report("answer", node, id=HANG, found=to_plain(node_stacks(node)))
    assert story.view.hangs is None
    assert story.ended(codes=(1, 1)).state.launch.verdict.cause["kind"] == "exception"


def test_who_asks_when_the_workers_end_hears_that_they_have():
    story = ask(Story(2).running(policy={"max_restarts": 1})).crashed()
    assert answer_of(story).missing == dict.fromkeys((0, 1), "has no workers")
    say(ask(story), 0, 1)
    assert sorted(answer_of(story).ranks) == [0, 1, 2, 3], "those that have started again"


# --- the control node's task -----------------------------------------------------------------------


def test_commands_of_several_kinds_are_served_beside_each_other(tmp_path):
    registry = Registry(FlowDataStore("Flow", storage_impl=LocalStorage, ds_root=str(tmp_path)), "1", "train", "2", 0)
    asked, found = [], {}
    link = SimpleNamespace(
        ask=lambda *about: asked.append(about) or len(asked) - 1, has_answer=found.__contains__, pop_answer=found.pop
    )
    store = GangStore(SimpleNamespace(link=link), (), Cards(None), registry)
    requests = {"profile": Request("a", {"rank": 0}), "stacks": Request("b", {})}
    registry.save(Requests(requests))
    store._serve()
    assert asked == [("request", "a", "profile", {"rank": 0}), ("request", "b", "stacks", {})]
    found[1] = {"nodes": {}}
    registry.save(Requests({**requests, "stacks": Request("c", {})}))
    store._serve()
    found[0] = {"parts": []}
    store._serve()
    assert asked[2:] == [("request", "c", "stacks", {})], "each once"
    told = registry.load(Replies).last
    assert {what: (reply.request.id, reply.data) for what, reply in told.items()} == {
        "stacks": ("b", {"nodes": {}}),
        "profile": ("a", {"parts": []}),
    }


# --- the command -------------------------------------------------------------------------------------


def gang_stacks(*lines, generation=0, **more):
    return GangStacks(0, generation, {node: node_stacks(node, line) for node, line in enumerate(lines)}, **more)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the command while its gang gives these answers; the gang has ended after the last."""
    monkeypatch.setattr(LocalStorage, "datastore_root", str(tmp_path))
    datastore = FlowDataStore("Flow", storage_impl=LocalStorage, ds_root=str(tmp_path))
    datastore.get_task_datastore("1", "train", "2", attempt=0, mode="w").init_task()
    registry, clock, seen = Registry(datastore, "1", "train", "2", 0), [0.0], {None}

    def run(*options, answers=(), ends=True):
        given, of_another = list(answers), Requests({"stop": Request("of another command", {})})
        registry.save(of_another)

        def sleep(seconds):
            clock[0] += seconds
            request = (registry.load(Requests) or Requests()).last.get("stacks")
            if ends and not given:
                write(tmp_path / "Flow" / "1" / "train" / "2" / "0.DONE.lock", "")
            elif given and request is not None and request.id not in seen:
                seen.add(request.id)
                registry.save(Replies({"stacks": Reply(request, clock[0], to_plain(given.pop(0)))}))

        fake = SimpleNamespace(**{**vars(time), "sleep": sleep, "monotonic": lambda: clock[0]})
        monkeypatch.setattr(asking, "time", fake)
        monkeypatch.setattr(stacks_command, "time", fake)
        obj = SimpleNamespace(flow=SimpleNamespace(name="Flow"), graph=[], flow_datastore=datastore)
        asked = CliRunner().invoke(commands.torchrun, ["stacks", "1/train", *options], obj=obj)
        assert registry.load(Requests) == of_another, "its own is gone, since nobody waits for it"
        return asked.output.splitlines() if asked.exception is None else str(asked.exception)

    return run


def test_ranks_at_one_place_are_named_together_and_each_stack_stands_once(run):
    first, *lines = run(answers=[gang_stacks(1, 7, missing={2: "has not answered in time"})])
    assert first.endswith("  Launch 0, 4 ranks on 2 nodes:")
    assert lines == [
        "  ranks 0, 1: train.py:1 in step",
        "  ranks 2, 3: train.py:7 in step",
        "  node 2 has not answered in time",
        *["", "--- rank 0 (node 0, host host-0), and the same in rank 1", "short"],
        *["", "--- rank 2 (node 1, host host-1), and the same in rank 3", "short"],
    ]


def test_one_rank_is_shown_alone_and_one_that_has_not_answered_is_an_error(run):
    heading, text = run("--rank", "2", answers=[gang_stacks(1, 1)])[-2:]
    assert (heading[:18], text) == ("--- rank 2 (node 1", "text"), "the whole stack"
    plain = json.loads(run("--rank", "2", "--json", answers=[gang_stacks(1, 1)])[0])
    assert [sorted(node["ranks"]) for node in plain["nodes"].values()] == [[], ["2"]]
    said = "Rank 9 has not answered. Ranks that have: 0, 1, 2, 3."
    assert run("--rank", "9", answers=[gang_stacks(1, 1)], ends=False) == said
    assert run("--rank", "9", "--watch", answers=[gang_stacks(1, 1)])[0] == said
