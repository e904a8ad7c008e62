"""Launches that hang: what the gang decides and concludes, what its page shows, and what a node tells."""

import json
from dataclasses import replace

import pytest
from gang_of import running
from gang_views import Story, place

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.gang.questions import HANG, NO_WORKERS
from metaflow_extensions.torchrun.plugins.torchrun.gang.stacks import (
    GangStacks,
    NodeStacks,
    conclude,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.machine.frames import Found, without_stack
from metaflow_extensions.torchrun.plugins.torchrun.show.page import page_of
from metaflow_extensions.torchrun.plugins.torchrun.show.parts import Block

# --- the decision -----------------------------------------------------------------------------------


def silence(gang):
    """Return after how many seconds the ranks are asked where they are, and what all nodes raise then."""
    seconds = next((each for each in range(1, 2000) if gang.pass_time(1.0).got(0, "Ask")), None)
    return seconds, seconds and str(gang.play("+11, stop").same_verdict())


def test_silence_of_all_ranks_is_a_hang():
    gang = running(2, hang_timeout_s=30.0).play("lives 1, +5")
    gang.say(0, Report("hangs", 0, 0, {"age_s": 9.0}))  # older than what node 1 has told
    seconds, said = silence(gang)
    text = "no rank wrote anything, reported a step, joined a process group or exited for 30 s."
    assert (seconds, f"{text} If they were only slow, set hang_timeout_s above 30." in said) == (26, True)
    assert silence(running(2, hang_timeout_s=None)) == (None, None), "nobody asks for it"


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(30.0, 600), (1000.0, 1000)])
def test_the_time_before_the_first_sign_of_life_has_a_limit_of_its_own(timeout_s, limit_s):
    gang = running(2, hang_timeout_s=timeout_s, max_restarts=1).play("lives 1, crash 1, stop 0")
    seconds, said = silence(gang)  # workers have started again, and import again
    advice = f"If they were only slow, set hang_timeout_s above {limit_s}."
    assert (seconds, f"exited for {limit_s} s after the start. {advice}" in said) == (limit_s + 1, True)


def test_time_in_which_the_control_node_itself_was_stopped_is_no_silence():
    gang = running(2, hang_timeout_s=30.0).play("lives 1, +20, frozen 700")
    gang.now += 700.0
    assert silence(gang)[0] == 11


# --- the conclusion -----------------------------------------------------------------------------------


def at(line, function="step", waits=False, text="the whole stack"):
    where, source = f"train.py:{line} in {function}", f"{function}()"
    return Found(where, f"mark{line}", text, source, f"{where}: {source}", waits)


WAITS = at(41, "main", waits=True)
SAME = replace(WAITS, text="", line="", short="")  # as the second of its node is sent
FOUND = {0: WAITS, 1: SAME}, {2: WAITS, 3: at(33, "load")}


def answers(*nodes, missing=()):
    """Return what nodes have answered, each with its ranks."""
    return GangStacks(0, 0, {node: NodeStacks("", ranks) for node, ranks in enumerate(nodes)}, dict(missing))


@pytest.mark.parametrize(
    ("nodes", "said", "first"),
    [
        ([{0: at(7)}], "No answer came from nodes 1, 2: look there first.", []),
        ([{0: at(7)}, {1: WAITS}], "No answer came from node 2: look there first.", []),
        ([{}, {1: without_stack("it is stopped")}], "No answer came from node 2: look there first.", []),
        ([{0: at(7)}, {1: WAITS}, {2: WAITS}], "Look at rank 0 first: the others seem to wait.", [0]),
    ],
)
def test_a_node_that_has_not_answered_is_where_to_look(nodes, said, first):
    missing = dict.fromkeys(range(len(nodes), 3), "has not answered in time") | {3: NO_WORKERS}
    detail, record = conclude(answers(*nodes, missing=missing), ())
    assert detail.splitlines()[0].endswith(said)
    assert record["first"] == first


def test_where_thousands_of_ranks_hang_is_told_by_place():
    places = [at(9 if node == 17 else 12, text="x" * 500_000) for node in range(300)]
    nodes = ({node * 2: place, node * 2 + 1: place} for node, place in enumerate(places))
    detail, record = conclude(answers(*nodes), ())
    assert detail.startswith(
        "Look at ranks 34, 35 first: most ranks are at another place.\n"
        "Ranks 0-33, 36-599: train.py:12 in step: step()\nRanks 34, 35: train.py:9 in step: step()"
    )
    assert len(json.dumps(record)) < 150_000, "it is stored again and again"


# --- the page -----------------------------------------------------------------------------------------


def hanging(**policy):
    """Return a gang whose second launch has hung; it is stopped."""
    policy = {"hang_timeout_s": 30.0, **policy}
    story = Story().running().ended().ready(launch=1, policy=policy).report("started").report("hangs", age_s=0.0)
    story.at(story.now + 31)
    for node, ranks in enumerate(FOUND):
        story.report("answer", node, id=HANG, found=to_plain(NodeStacks("", ranks)))
    return story.at(story.now + 1).ended(codes=(-9, -9))


def test_ranks_that_had_ended_well_are_named_and_a_rank_that_goes_on_meanwhile_is_no_hang():
    story = Story().running(policy={"hang_timeout_s": 30.0}).report("hangs", age_s=0.0).ended(1)
    story.at(story.now + 31).report("hangs", 0, age_s=0.0).at(story.now + 30)
    assert story.view.outcome == "running", "its answer was not waited for"
    story.at(story.now + 1).report("answer", 0, id=HANG, found=to_plain(NodeStacks("", FOUND[0]))).at(story.now + 1)
    cause = story.ended(0, ok=False).state.launch.verdict.cause
    said = "The ranks of node 1 had ended well: do all ranks make the same number of steps?"
    assert cause["detail"].splitlines()[0].endswith(said)


def section(story):
    """Return the hang's sentence and blocks."""
    (kept,) = [each.parts for each in page_of(story.view, place()).sections if each.name == "hangs"]
    return kept[0].text, [(part.title, part.parts[0].text) for part in kept if isinstance(part, Block)]


def test_a_page_shows_each_stack_once_and_where_to_look_first():
    sentence, blocks = section(hanging())
    assert sentence.startswith(
        "The ranks of launch 1 when it hung: your own frames of each stack, the innermost first."
    )
    assert sentence.endswith("Look at rank 3 first: the others seem to wait.")
    assert blocks == [
        ("Ranks 0, 1, 2: train.py:41 in main", "train.py:41 in main: main()"),
        ("Rank 3: train.py:33 in load", "train.py:33 in load: load()"),
    ]
    again = hanging(max_restarts=1)
    assert (again.view.outcome, section(again)) == ("starting", (sentence, blocks))
    assert Story().running().view.hangs is None
