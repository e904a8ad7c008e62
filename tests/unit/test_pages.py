"""The page of a gang, written to a terminal and as a card, and its data.

Four whole pages are golden files; ``pytest --renew-golden tests/unit/test_pages.py`` writes these anew.
"""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from gang_views import BEGAN, Story, crash, hostile, place

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.view import Word, told_by_others
from metaflow_extensions.torchrun.plugins.torchrun.show.charts import COLOURS
from metaflow_extensions.torchrun.plugins.torchrun.show.page import page_of
from metaflow_extensions.torchrun.plugins.torchrun.show.parts import Cells, Chart, Sentence, layout, lines_of, table
from metaflow_extensions.torchrun.plugins.torchrun.show.words import outcome_of

TWICE = {"max_restarts": 2}
OVER = place(is_done=True)
WHAT = "Rank 2 on node 1 (host gpu-1) failed with ValueError: *nan* 🙂"
KILLED = "node 1 (host gpu-1) failed: its task was killed by SIGKILL"
COMMAND = "before_run {}/2 (get https://x) exited with code {}"


def works(story, seconds, slow=2.0, other=1):
    """Let ranks report steps, every 5 s, and nodes their usage; rank 3 is on node `other`, and as fast as the test says."""
    story.progress({0: 2.0}, [(1, {"first": 1.0})], total=400.0)  # one value is no line
    for second in range(int(story.now), int(story.now) + seconds, 5):
        values = {"loss": 90 / (second + 20), "grad": None if second > 60 else 1.5}
        story.at(second).progress({0: 2.0, 1: 2.0}, [(2 * second, values)], total=400.0)
        story.progress({2: 2.0, 3: slow}, node=other)
    used = {"of": "container", "limits": {"cpus": 8.0, "memory_mib": 2.0**15}}
    return story.report("usage", **used, values={"cpus": 6.5, "memory_mib": 5000.0}).at(second + 3)


def good():
    files = {"key": "k", "files": 2, "size": 3_000_000, "names": ["model.pt", "log.txt"]}
    story = works(Story().running(), 60).ended(0, stores=True).ended(1)
    return story.at(64).report("outputs", 0, **files).stored(0).at(66).done().at(67).left(1).at(70).left(0)


def restarted():
    story = Story(3, spare_nodes=1).running(policy=TWICE).at(8).lost(1).at(10).ended(0, codes=(-15, -15))
    return works(story.at(12).report("started").at(13).report("wrote", 0), 10, other=2)


GOLDEN = {
    "good": (good, OVER),
    "failed": (lambda: Story().running().at(8).crashed().at(12).left(how="failed"), OVER),
    "running": (lambda: works(Story().running(policy=TWICE), 80, slow=0.5), place()),
    "restarted": (restarted, place()),
}


def failing_before():
    """Commands of before_run fail on one node, before the other one has called `run`."""
    story = Story().joined().at(2.0).prepare(1).at(3.0)
    story.report("command", 1, text=COMMAND.format(1, 0), exit_code=0, seconds=1.0).at(5.0)
    story.report("command", 1, text=COMMAND.format(2, 2), exit_code=2, seconds=2.0)
    return story.failed(Cause("command", 1, "gpu-1", exit_code=2, exception=COMMAND.format(2, 2), detail="no host"))


# Other gangs, with lines of their pages that no golden file has, each with single spaces: the sentence, ranks, and more.
SAID = {
    "nobody yet": (
        Story,
        "0 of 2 nodes have joined; not joined yet: nodes 0, 1.",
        *("No launch has begun, so there are no ranks.", "0 4 not joined yet", "so far 0 s"),
    ),
    "calling run": (
        lambda: Story().joined().ready(0),
        "1 of 2 nodes have called run; still in the step's code: node 1.",
        *("4 waiting", "0 gpu-0 4 0-1 waiting"),
    ),
    "before_run": (
        lambda: Story().joined().at(2.0).prepare().at(5.0).ready(0),
        *("The commands of before_run run on node 1.", "4 waiting", "1 gpu-1 4_node_1 2-3 preparing"),
        *("2.0 0 nodes 0, 1: before_run begins", "5.0 0 node 0: before_run has ended well"),
    ),
    "before_run has failed": (
        failing_before,
        *(f"Failed after 5 s: node 1 (host gpu-1) failed: {COMMAND.format(2, 2)}.", "| no host"),
        f"5.0 0 node 1: {COMMAND.format(2, 2)}, 2.0 s",
    ),
    "contradicting": (
        lambda: Story().joined().ready(0).ready(1, torch="2.12.0"),
        "Failed after 0 s: The nodes differ in the torch version (node 0: 2.13.0, node 1: 2.12.0). Every node must call "
        "current.torch.run in the same order with the same settings, on the same software and kind of devices.",
    ),
    "broken": (
        lambda: Story().running().ended().broken("The channel failed\nat once"),
        *("Failed (trained 2 s): The channel failed.", "Error", "at once"),
    ),
    "restarting": (
        lambda: Story().running(policy=TWICE).failed(crash()).ended(codes=(-15, -9)),
        *(
            "4 ranks on 2 nodes are starting, for 0 s, after 1 restart.",
            "4 starting",
            "4.0 0.1 start again on 2 nodes, 2 processes on each",
        ),
        "restarts 1 (1 left in launch 0)",
    ),
    "awaiting another task": (
        lambda: Story(replaces=True).running(policy=TWICE).lost(1).ended(0, codes=(-15, -15)),
        *(
            f"All workers start again, which wait for node 1 to start, until 2026-11-22 02:30:04 UTC at most: {KILLED}.",
            "2 lost, 2 stopped",
        ),
    ),
    "caught": (
        lambda: Story().running().at(8).crashed().at(10).done().at(12).left(),
        *(f"The step has ended well, though launch 0 had failed: {WHAT}.", "1 failed, 3 stopped"),
    ),
    "without a launch": (lambda: Story().joined().done(), "The step has ended well; it has launched nothing."),
    "many ranks": (
        lambda: Story(9, 8).running().crashed(crash(64, "no", 8, "gpu-8")),
        *("1 failed, 71 stopped", "failed: rank 64 on node 8", "0.5-1.5 nodes 0-8: joined"),
        "8 gpu-8 - 64-71 step code 6 x unknown, 1 x 1, 1 x SIGTERM",
    ),
}
STORIES = {name: story for name, (story, *_) in (GOLDEN | SAID).items()}


def whole(story, where=None, is_short=False):
    return page_of(story().view, where or place(), is_short)


def spread(component, depth=0):
    """Return a component as lines: of HTML one for each tag, of a chart and of each row of a table one."""
    pad, known = "  " * depth, {key: value for key, value in component.items() if key not in ("contents", "data")}
    source, spec = known.pop("source", None), known.pop("spec", None)
    yield pad + json.dumps(known, ensure_ascii=False)
    yield from (f"{pad}  {line}" for line in (source or "").replace("><", ">\n<").splitlines())
    yield from [f"{pad}  {json.dumps(spec, ensure_ascii=False)}"] if spec else []
    yield from (f"{pad}  {json.dumps(row, ensure_ascii=False)}" for row in component.get("data", ()))
    for each in component.get("contents", ()):
        yield from spread(each, depth + 1)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_whole_page_on_a_terminal_and_as_a_card(name, golden):
    golden(f"{name}.txt", "\n".join(lines_of(whole(*GOLDEN[name]))) + "\n")
    golden(f"{name}.card", "\n".join(spread(layout(whole(*GOLDEN[name], is_short=True)))) + "\n")


@pytest.mark.parametrize("name", SAID)
def test_what_a_page_says_of_other_gangs(name):
    story, *said = SAID[name]
    lines = [" ".join(line.split()) for line in lines_of(whole(story))]
    assert [line for line in said if line not in lines] == [], "\n".join(lines)


@pytest.mark.parametrize("name", STORIES)
def test_all_pages_have_whole_times_a_colour_for_each_state_and_the_same_texts_as_a_card(name):
    view, short = STORIES[name]().view, whole(STORIES[name], is_short=True)
    for node in view.nodes:
        assert node.since[0][1] == 0.0
        assert all(begin < end for (_, begin), (_, end) in pairwise(node.since))
    parts = [part for section in short.sections for part in section.parts]
    cells = [cell for part in parts if isinstance(part, Cells) for cell in part.cells]
    assert {cell.state for cell in cells} | {outcome_of(view)} <= COLOURS.keys()
    (times,) = [part.spec for part in parts if isinstance(part, Chart) and "x2" in part.spec.get("encoding", {})]
    assert {row["state"] for row in times["data"]["values"]} == set(times["encoding"]["color"]["scale"]["domain"])
    json.dumps(layout(short), allow_nan=False)
    text = " ".join(" ".join(lines_of(whole(STORIES[name]))).split())
    said = [part.text for part in parts if isinstance(part, Sentence) and part.kind != "note"]
    assert [each for each in said if " ".join(each.split()) not in text] == []


@pytest.mark.parametrize(("seconds", "is_said"), [(61.9, False), (63.0, True)])
def test_that_there_are_no_metrics_is_not_said_in_the_first_minute(seconds, is_said):
    """Of the training; it began after 2 s."""
    lines = lines_of(page_of(Story().running().at(seconds).view, place()))
    assert [line.startswith("No metrics: a script reports") for line in lines].count(True) == is_said


# --- of Metaflow ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            "has not recorded how. The last that is known, of 2026-11-22 02:20:09 UTC: 4 ranks on 2 nodes have trained 7 s",
        ),
        (["Pod c-1 was deleted.\nIt was evicted."], "Failed (trained 10 s, with start 12 s): Pod c-1 was deleted."),
    ],
)
def test_the_end_of_a_control_node_that_was_killed_is_told_by_others_or_unknown(words, said):
    known = told_by_others(Story().running().at(9).view, [Word(text, BEGAN + 12, 2) for text in words])
    lines = lines_of(page_of(known, OVER))
    assert said in lines[2]
    assert ("These are the last known states." in lines, "4 running" in lines) == (not words, not words)
    assert words == [] or {"It was evicted.", "2 lost, 2 stopped", "   0  gpu-0  4         0-1    lost"} <= {*lines}


@pytest.mark.parametrize(("seconds", "is_said"), [(300, False), (302, True)])
def test_a_gang_whose_workers_ran_and_of_which_nothing_is_heard_may_have_been_killed(seconds, is_said):
    view = Story().running().at(9).view
    sentence = place().sentence(view.at(view.now_s + seconds))
    assert sentence.startswith("Nothing is heard of this gang any more") is is_said
    assert ("have trained 7 s" in sentence) is is_said  # and not longer, as far as is known


def test_what_metaflow_knows_stands_in_the_title_links_and_commands():
    view = GOLDEN["failed"][0]().view
    an_earlier = place(1, 2, typed="show", clone=("13", "9"))
    assert an_earlier.title == (
        "Flow, run 12, step train, task 4, attempt 1 (the latest is 2), which run 13 has cloned as task 9"
    )
    logs = "python flow.py torchrun logs 12/train --attempt 1"
    assert an_earlier.commands(view).splitlines() == [logs, f"{logs} --rank 2"], "not the command that was typed"
    assert replace(an_earlier, typed="").commands(view).splitlines()[0] == logs.replace("logs", "show")
    for node, task in zip(view.nodes, ("12/train/4", "12/train/5"), strict=True):
        node.task = task
    shown = "\n".join(spread(layout(page_of(view, place(ui_url="https://ui/", tasks={})))))
    assert [f"[{task}](https://ui/Flow/12/train/{task})" in shown for task in (4, 5)] == [True, True]


# --- texts ------------------------------------------------------------------------------------------


def test_a_page_names_a_function_and_not_the_script_of_ours_that_calls_it():
    lines = lines_of(page_of(Story().running(function="Trainer.fit").view, place()))
    assert [line.split() for line in lines if "Trainer.fit" in line] == [["function", "Trainer.fit"]]
    assert "train.py" not in "\n".join(lines)


def test_a_card_has_bounded_lists_and_texts_and_a_terminal_all():
    story = Story().running(policy={"max_restarts": 20})
    for number in range(15):
        story.crashed(crash(text=f"Error{number}", detail="a" * 40_000)).at(200.0 * number + 100).report("started")
    short, terminal = (lines_of(page_of(story.view, place(), is_short=is_short)) for is_short in (True, False))
    assert [sum("start again on" in line for line in lines) for lines in (short, terminal)] == [14, 15]
    assert ("                 10 lines are left out here" in short, max(map(len, terminal))) == (True, 40_004)
    assert [sum(line.startswith("  | aaa") for line in lines) for lines in (short, terminal)] == [5, 15]
    assert {"… 8027 characters are left out here", "10 earlier failures are not shown here."} <= {*short}
    former = [line for line in short if line.startswith("After ")]
    assert [line.split("with ")[1] for line in former] == [f"Error{number}." for number in (14, 13, 12, 11, 10)]
    nodes = lines_of(page_of(Story(100).running().lost(68).view, place(), is_short=True))
    odd = nodes.index("These are node 0, and nodes that need a look.") + 2
    assert ([line.split()[0] for line in nodes[odd : odd + 2]], nodes[odd + 2]) == (["0", "68"], "")


def test_a_table_keeps_its_columns_whatever_is_in_it():
    lines = table(("name", "n", "rest"), [["模型🙂", "1", "x" * 90], ["a\x1b[31m\u0301", "10", ""]], right=("n",))
    assert lines == ["name     n  rest", "模型🙂   1  " + "x" * 90, "a?[31m\u0301  10"]


def test_nothing_that_is_shown_steers_a_terminal():
    assert all(line.isprintable() for line in lines_of(whole(hostile)))
