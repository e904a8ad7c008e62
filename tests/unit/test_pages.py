"""The page of a gang, written to a terminal and as a card, and its data.

Three whole pages are golden files; ``pytest --renew-golden tests/unit/test_pages.py`` writes these anew.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from gang_snapshots import (
    BEGAN,
    FAILURE,
    JOINED,
    LEFT,
    MARKUP,
    NOT_LEFT,
    RESTARTED,
    RUNNING,
    SUCCESS,
    a_gang,
    failed,
    place,
    report,
    snapshot,
)

from metaflow_extensions.torchrun.plugins.torchrun.elements.model import Sentence
from metaflow_extensions.torchrun.plugins.torchrun.elements.terminal import table
from metaflow_extensions.torchrun.plugins.torchrun.feature_list import on_page
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.records.on_page import OnPage
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import Snapshot
from metaflow_extensions.torchrun.plugins.torchrun.show.as_card import layout
from metaflow_extensions.torchrun.plugins.torchrun.show.as_text import lines_of
from metaflow_extensions.torchrun.plugins.torchrun.show.data import as_data
from metaflow_extensions.torchrun.plugins.torchrun.show.page import page_of, section_names
from metaflow_extensions.torchrun.plugins.torchrun.show.timeline import timeline

# As versions before the `Snapshot` have stored them: of a gang of 2 x 2 that restarts, runs again, and fails.
STORED = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "records").glob("*.json")}


def command(at_s, node, seconds, code=0, number=1):
    text = f"before_run {number}/2 (get https://x) exited with code {code}"
    return (at_s, "command", {"node": node, "launch": 0, "exit_code": code, "text": text, "seconds": seconds})


BEFORE = [
    *JOINED[:2],
    *((2.0 + node, "before_run", {"node": node, "launch": 0}) for node in (0, 1)),
    *(command(3.0 + node, node, 1.0 + node) for node in (0, 1)),
    command(5.0, 1, 0.5, code=2, number=2),
    (7.0, "failed", {"launch": 0, "text": "because"}),
]
ODD = [
    *RUNNING,
    *((60.0 + rank, "straggler", {"rank": rank, "node": 1, "text": f"is slow: 0.{rank}"}) for rank in (1, 2, 3)),
    (70.0, "recovered", {"rank": 2, "node": 1, "text": "is no longer slow: 1"}),
    (71.0, "stored", {"node": 0, "text": "3 files, 2.1 MB"}),
    (72.0, "teleported", {"node": 1, "text": "to Mars"}),
    (73.0, "omitted", {"text": "12 records are left out here"}),
]
GOLDEN = {
    "success": (snapshot(SUCCESS), place(is_done=True)),
    "failed": (Snapshot.read(STORED["failed"]), place(is_done=True)),
    "running": (Snapshot.read(STORED["running"]), place()),
}
LOST = [*JOINED, (6.0, "lost", {"node": 1, "text": "its task has ended"}), (6.0, "broken", {"text": "lost"})]
BEGUN_AGAIN = [each for each in RESTARTED if each[0] < 11]
# Other gangs, with lines of their pages that no golden file has.
SAID = {
    "nobody yet": (
        (snapshot([]), place()),
        ("4 waiting", "   0        4         0-1    not joined yet", "so far         0 s"),
    ),
    "joining": (
        (snapshot(JOINED[:1], nproc=None), place()),
        ("No launch has begun, so there are no ranks.", "   0  gpu-1  4                step code"),
    ),
    "failure": (
        (snapshot(FAILURE, report(), error="told shorter"), place(is_done=True)),
        (
            "Last lines of rank 2's stdout",
            "step 42: loss nan",
            "20.0-20.5          nodes 0, 1 left: their steps have failed",
        ),
    ),
    "no cause": (
        (snapshot(FAILURE, replace(report(text="The nodes differ\nin torch"), cause=None)), place(is_done=True)),
        ("Error", "in torch"),
    ),
    "an earlier attempt": (
        (snapshot(RESTARTED, report(None), restarts_left=2), place(1, 2)),
        (
            "Flow, run 12, step train, task 4, attempt 1 (the latest is 2), as of 02:20:19 UTC",
            "     18.0  0.1     the launch has ended well",
            "restarts       1 (2 left in launch 0)",
            "python flow.py torchrun logs 12/train --attempt 1",
        ),
    ),
    "starting again": (
        (snapshot(BEGUN_AGAIN, report(None), now_s=12.0, restarts_left=0), place()),
        ("   1  gpu-2  4_node_1  2-3    starting", "last record    2026-11-22 02:20:10 UTC, 2 s ago"),
    ),
    "caught": (
        (snapshot([*NOT_LEFT, *LEFT], report()), place(is_done=True)),
        ("After 9 s: Rank 2 on node 1 (host gpu-2) failed with ValueError: *nan* 🙂.", "run raised LaunchFailed."),
    ),
    "killed": (
        (snapshot(RUNNING), place(is_done=True)),
        (
            "The task of the control node (node 0) has ended, but has not recorded how. Its last record, of 2026-11-22 "
            "02:20:04 UTC: 4 ranks on 2 nodes have trained 2 s, with start 4 s.",
            "These are the last known states.",
        ),
    ),
    "lost": (
        (snapshot(LOST, num_nodes=3), place(is_done=True)),
        (
            "2 lost, 4 waiting",
            "    6.0          node 1 is lost: its task has ended",
            "    6.0          nothing can be launched any more: lost",
            "   1  gpu-2  4_node_1  2-3    lost",
            "   2         -         4-5    not joined yet",
        ),
    ),
    "before_run": (
        (snapshot(BEFORE), place()),
        (
            "2.0-3.0  0       nodes 0, 1: before_run begins",
            "3.0-4.0  0       nodes 0, 1: before_run 1/2 (get https://x) exited with code 0, 1.0-2.0 s",
            "    5.0  0       node 1: before_run 2/2 (get https://x) exited with code 2, 0.5 s",
        ),
    ),
    "odd": (
        (snapshot(ODD, now_s=74.0), place(clone=("13", "9"))),
        (
            "Flow, run 12, step train, task 4, which run 13 has cloned as task 9, as of 02:21:14 UTC",
            "61.0-63.0          ranks 1, 2, 3: slower than half the median for a minute",
            "     70.0          rank 2: no longer slow",
            "     71.0          node 0 stored outputs",
            "     72.0          teleported: to Mars",
            "     73.0          omitted: 12 records are left out here",
        ),
    ),
    "many ranks": (
        (failed(a_gang(9, 8), 70, "no"), place()),
        (
            "failed: rank 70 on node 8",
            "    0.5          nodes 0-8 joined",
            "   8  host-8  -         64-71  step code  7 x unknown, 1 x 1",
            "python flow.py torchrun logs 12/train --rank 70",
        ),
    ),
}
CASES = {**GOLDEN, **{name: case for name, (case, _) in SAID.items()}}


def page(name, is_short=False):
    return page_of(*CASES[name], on_page(), is_short)


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
    golden(f"{name}.txt", "\n".join(lines_of(page(name))) + "\n")
    golden(f"{name}.card", "\n".join(spread(layout(page(name, is_short=True)))) + "\n")


@pytest.mark.parametrize("name", SAID)
def test_what_a_page_says_of_other_gangs(name):
    lines = lines_of(page(name))
    assert [line for line in SAID[name][1] if line not in lines] == [], lines
    assert ("Cause" in lines) is (name == "failure")  # elsewhere the first sentence is all of it
    json.dumps(layout(page(name, is_short=True)), allow_nan=False)


def test_tasks_are_links_where_metaflows_ui_is_known():
    known = snapshot(RUNNING, tasks=("12/train/4", "12/train/5"))
    shown = "\n".join(spread(layout(page_of(known, replace(place(ui_url="https://ui/"), tasks={}), is_short=True))))
    assert [f"[{task}](https://ui/Flow/12/train/{task})" in shown for task in (4, 5)] == [True, True]


# --- as data ----------------------------------------------------------------------------------------


def test_a_gang_as_data():
    known = snapshot(FAILURE, report(), error="told shorter", restarts_left=1, command="torchrun x")
    data = as_data(place(1, 2, is_done=True), known, ["progress", "usage"])
    node = {"node": 1, "host": "gpu-2", "task": "4_node_1", "ranks": [2, 3], "state": "failed", "seconds": 18.5}
    assert data.pop("nodes")[1] == {**node, "exit_codes": {"2": 1, "3": -15}}
    assert [(event["kind"], event["node"], event["text"]) for event in data.pop("events")[:2]] == [
        ("joined", 0, "gpu-1"),
        ("joined", 1, "gpu-2"),
    ]
    assert [each["error"] for each in data.pop("reports")] == ["LaunchFailed"]
    assert data == {
        "run": "12",
        "clone": None,
        "control_task": "4",
        "attempt": 1,
        "last_attempt": 2,
        "outcome": "failed",
        "sentence": known.summary.sentence,
        "began": BEGAN,
        "seconds": 20.5,
        "restarts": 0,
        "nproc_per_node": 2,
        "restarts_left": 1,
        "facts": {},
        "command": "torchrun x",
        "progress": None,
        "usage": None,
    }
    of_clone = as_data(place(is_done=True, clone=("13", "9")), snapshot(RUNNING))
    assert (of_clone["outcome"], of_clone["clone"]) == ("ended", {"run": "13", "control_task": "9"})


def test_a_gang_without_records_has_the_same_data_which_are_null():
    data, known = (as_data(place(attempt=1, last=2), known, ["progress"]) for known in (None, snapshot(RUNNING)))
    assert data.keys() == known.keys()
    node = dict.fromkeys(("host", "state", "seconds"))
    assert data["nodes"] == [
        {"node": number, "task": task, "ranks": [], "exit_codes": {}, **node} for number, task in place().tasks.items()
    ]
    of_metaflow = ("run", "control_task", "attempt", "last_attempt", "nodes", "restarts", "facts", "reports", "events")
    assert {data[name] for name in data.keys() - of_metaflow} == {None}


def test_a_feature_that_keeps_nothing_is_not_in_the_data():
    data = as_data(place(), a_gang(silent=None, usage={"nodes": {}}), ["progress", "usage"])
    assert ("silent" in data, data["progress"], data["usage"]) == (False, None, {"nodes": {}})


# --- both kinds of pages ----------------------------------------------------------------------------


def test_a_page_without_accelerators_does_not_say_for_which_pytorch_was_built():
    built = {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.27.5", "python": "3.11", "devices": "none"}
    for devices, named in (("none", []), ("H100", ["CUDA", "NCCL", "devices"])):
        lines = lines_of(page_of(replace(snapshot(SUCCESS), facts={**built, "devices": devices}), place()))
        words = [line.split()[0] for line in lines if line]
        assert [word for word in ("PyTorch", "CUDA", "NCCL", "devices") if word in words] == ["PyTorch", *named]


def test_a_page_names_a_function_and_not_the_script_of_ours_that_calls_it():
    of_script = replace(snapshot(SUCCESS), command="torchrun -- train.py --lr 1")
    assert [line for line in lines_of(page_of(of_script, place())) if "train.py" in line] == [
        "entrypoint and arguments  train.py --lr 1",
        "torchrun -- train.py --lr 1",
    ]
    of_function = replace(of_script, facts={"function": "Trainer.fit"})
    lines = lines_of(page_of(of_function, place()))
    assert [line.split() for line in lines if "Trainer.fit" in line] == [["function", "Trainer.fit"]]
    assert "train.py" not in "\n".join(lines)


RATES = {
    "by": "steps_per_s",
    "ranks": 2,
    "median": 2.0,
    "slowest": {"rank": 1, "node": 0, "speed": 0.5},
    "stragglers": [{"rank": 1, "node": 0, "speed": 0.5, "text": "is slower than half the median"}],
}
OF_ONE = {
    "usage": {"nodes": {"0": {"of": "container", "limits": {}, "last": {"cpus": 2.0}, "highest": {"cpus": 3.0}}}},
    "progress": {
        "step": 3, "done": 3, "total": 5, "steps_per_s": None, "left_s": None, "last": {}, "series": {}, "rates": RATES,
    },
}  # fmt: skip
MANY_RANKS = 80


@pytest.mark.parametrize("nproc", [2, MANY_RANKS])
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("has_failed", [False, True])
def test_the_page_of_a_single_node_has_no_number_for_it(nproc, is_done, has_failed):
    gang = replace(a_gang(1, nproc, **OF_ONE), command="torchrun -- train.py")
    if has_failed:
        gang = failed(gang, 1, "Rank 1 (host h) failed")
    page = page_of(gang, place(is_done=is_done), on_page())
    for text in ("\n".join(lines_of(page)), json.dumps(layout(page))):
        assert re.findall("node 0|Node 0", text) == []
    text = "\n".join(lines_of(page))
    for words in ("the node joined", "slowest: rank 1, 0.5", "host host-0) ", "2, highest 3"):
        assert words in text
    assert ("rank 1 on" in text, "failed: rank 1" in text) == (False, has_failed and nproc == MANY_RANKS)


def test_a_page_does_not_name_the_command_that_was_just_typed():
    known = Snapshot.read(STORED["failed"])
    where = f"python flow.py torchrun {{}} {place().run}/{place().step}"
    commands = place(typed="show").commands(known).splitlines()
    assert commands == [where.format("logs"), f"{where.format('logs')} --rank 1"]
    assert place().commands(known).splitlines() == [where.format("show"), *commands]


def test_what_is_on_a_card_and_not_on_a_terminal_is_a_chart_or_a_cell_or_explains_them():
    """All sections have the same texts in both, where the page has the space."""
    for name in CASES:
        text = " ".join(" ".join(lines_of(page(name))).split())
        for section in page(name, is_short=True).sections:
            said = [part.text for part in section.parts if isinstance(part, Sentence) and part.kind != "note"]
            assert [each for each in said if " ".join(each.split()) not in text] == []


class Late(OnPage):
    after = "ranks"

    def parts(self, kept, summary):
        return [Sentence(f"{kept['a']} {summary.outcome}")]


def test_a_feature_has_a_section_where_it_asks_for_one_and_harms_no_other():
    names = section_names({"late": Late()})
    assert names == ["outcome", "ranks", "late", "timeline", "nodes", "launch"]
    lines = lines_of(page_of(a_gang(late={"a": "kept"}), place(), {"late": Late()}))
    assert lines[lines.index("Late") + 1] == "kept running"
    of_older = lines_of(page_of(a_gang(late={}), place(), {"late": Late()}))
    assert "This can't be shown: KeyError: 'a'" in of_older
    assert of_older.index("Nodes") > of_older.index("Late")


@pytest.mark.parametrize("missing", [{3}, {2, 3}])
def test_a_rank_whose_exit_code_nobody_knows_is_listed_all_the_same(missing):
    told = [each for each in FAILURE if each[1] != "exited" or each[2]["rank"] not in missing]
    of_node_1 = as_data(place(), snapshot(told, report()))["nodes"][1]
    assert of_node_1["exit_codes"] == {"2": None if 2 in missing else 1, "3": None}
    (row,) = [line for line in lines_of(page_of(snapshot(told), place())) if line.startswith("   1  gpu-2")]
    assert row.endswith(" unknown")


@pytest.mark.parametrize("kind", ["hang", "timeout", "lost", "restart", "preempted", "go"])
def test_only_a_sentence_that_is_whole_without_it_loses_what_was_said_before(kind):
    twice = snapshot([(at, kind, {"node": 1, "text": "the same"}) for at in (1.0, 2.0)])
    assert [what.endswith("the same") for _, _, what in timeline(twice.events)] == [True, True]


def test_a_card_has_bounded_lists_and_texts_and_a_terminal_all():
    told = [(float(at), "restart", {"launch": 0, "text": f"restart {at}"}) for at in range(300)]
    text = "Rank 0 failed\n" + "the error itself" + "a" * 40_000
    gang = snapshot(told, *(report(None, 60.0 * at, text) for at in range(1, 13)), report(text=text), error="x")
    short, whole = (lines_of(page_of(gang, place(), is_short=is_short)) for is_short in (True, False))
    assert "200 lines are left out here" in "\n".join(short)
    assert (len([line for line in short if "restart 2" in line]), "restart 150" in "\n".join(whole)) == (83, True)
    assert [sum(line.startswith("the error itself") for line in lines) for lines in (short, whole)] == [6, 13]
    assert "7 earlier failures are not shown here." in short
    assert [short.count(f"… {more} characters are left out here") for more in (8016, 8030)] == [5, 1]
    assert short.index("After 12 min 0 s: Rank 0 failed") < short.index("After 11 min 0 s: Rank 0 failed")
    assert max(map(len, whole)) > 40_000


def test_a_table_keeps_its_columns_whatever_is_in_it():
    lines = table(("name", "n", "rest"), [["模型🙂", "1", "x" * 90], ["a\x1b[31m\u0301", "10", ""]], right=("n",))
    assert lines == ["name     n  rest", "模型🙂   1  " + "x" * 90, "a?[31m\u0301  10"]


def test_nothing_that_is_shown_steers_a_terminal():
    cause = Cause("exception", 0, MARKUP, exception=MARKUP, detail=MARKUP).as_dict()
    gang = replace(failed(a_gang(host=MARKUP), 1, MARKUP), cause=cause, command=MARKUP, facts={"torch": MARKUP})
    for known in (gang, replace(gang, reports=(report(text=MARKUP), report(None, text=MARKUP)))):
        assert all(line.isprintable() or "\t" in line for line in lines_of(page_of(known, place(), on_page())))


def test_a_node_is_ready_when_its_commands_have_ended_and_one_without_any_when_it_calls_run():
    about = {"launch": 0}
    prepared = [
        (1.0, "before_run", {"node": 0, **about}),
        *((5.0 + node, "ready", {"node": node, **about}) for node in (0, 1)),
    ]
    said = [what for _, _, what in timeline(snapshot(prepared).events)]
    assert said == ["node 0: before_run begins", "node 0: before_run has ended well", "node 1 called run"]
