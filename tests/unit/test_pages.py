"""The page of a gang, written to a terminal and as a card, and its data: each compared with a golden file.

``pytest --renew-golden tests/unit/test_pages.py`` writes these anew.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gang_snapshots import (
    FAILURE,
    HERE,
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
from golden import FOLDER

from metaflow_extensions.torchrun.plugins.torchrun.features.listed import FEATURES
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.node.watchers import Feature
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import Snapshot
from metaflow_extensions.torchrun.plugins.torchrun.show.as_card import layout
from metaflow_extensions.torchrun.plugins.torchrun.show.as_text import lines_of
from metaflow_extensions.torchrun.plugins.torchrun.show.data import as_data
from metaflow_extensions.torchrun.plugins.torchrun.show.page import exit_codes, page_of, section_names
from metaflow_extensions.torchrun.plugins.torchrun.show.parts.model import Sentence
from metaflow_extensions.torchrun.plugins.torchrun.show.parts.terminal import table
from metaflow_extensions.torchrun.plugins.torchrun.show.timeline import timeline

# As versions before the `Snapshot` have stored them: of a gang of 2 x 2 that restarts, runs again, and fails.
STORED = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "records").glob("*.json")}


def command(at_s, node, seconds, code=0, number=1):
    text = f"before_run {number}/2 (get https://x) exited with code {code}"
    return (at_s, "command", {"node": node, "launch": 0, "exit_code": code, "text": text, "seconds": seconds})


BEFORE = [
    *JOINED,
    (2.0, "before_run", {**HERE, "text": "commands on 2 nodes"}),
    *(command(3.0 + node, node, 1.0 + node) for node in (0, 1)),
    command(5.0, 1, 0.5, code=2, number=2),
    (5.0, "stopping", {"launch": 0, "text": "because"}),
    *((6.0, "stopped", {"node": node, "launch": 0}) for node in (0, 1)),
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
MEMBER = replace(
    a_gang(1, 2, now_s=60.0, usage={"step_s": 5.0, "nodes": {"3": {"cpus": [1.0, 2.0]}}}),
    node=3,
    events=tuple(replace(each, node=None if each.node is None else 3) for each in a_gang(1, 2).events),
    control="12/train/4",
    of_nodes=4,
    command="torchrun x",
)
UI = {"ui_url": "https://ui/"}
CASES = {
    **{f"stored-{name}": (Snapshot.read(stored), place(is_done=name == "failed")) for name, stored in STORED.items()},
    "nobody-yet": (snapshot([]), place()),
    "joining": (snapshot(JOINED[:1], nproc=None), place()),
    "success": (snapshot(SUCCESS), place(is_done=True)),
    "failure": (snapshot(FAILURE, report(), error="told shorter"), place(is_done=True, **UI)),
    "no-cause": (
        snapshot(FAILURE, replace(report(text="The nodes differ\nin torch"), cause=None)),
        place(is_done=True),
    ),
    "restarted": (snapshot(RESTARTED, report(None), restarts_left=2), place(1, 2)),
    "starting-again": (
        snapshot([each for each in RESTARTED if each[0] < 11], report(None), now_s=12.0, restarts_left=0),
        place(),
    ),
    "caught": (snapshot([*NOT_LEFT, *LEFT], report()), place(is_done=True)),
    "killed": (snapshot(RUNNING), place(is_done=True)),
    "running": (snapshot(RUNNING, now_s=60.0, tasks=("12/train/4", "12/train/5")), place(last=1, attempt=1, **UI)),
    "lost": (
        snapshot(
            [*JOINED, (6.0, "lost", {"node": 1, "text": "its task has ended"}), (6.0, "broken", {"text": "lost"})],
            num_nodes=3,
        ),
        place(is_done=True),
    ),
    "before-run": (snapshot(BEFORE), place()),
    "odd": (snapshot(ODD, now_s=74.0), place(clone=("13", "9"))),
    "member": (MEMBER, replace(place(**UI), control_task="4_node_3", tasks={})),
    "many-ranks": (failed(a_gang(9, 8), 70, "no"), place()),
    "many-nodes": (failed(a_gang(70, 2, now_s=60.0), 139, "no"), place()),
}


def page(name, is_short=False):
    return page_of(*CASES[name], FEATURES, is_short)


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


@pytest.mark.parametrize("name", CASES)
def test_a_page_on_a_terminal(name, golden):
    golden(f"{name}.txt", "\n".join(lines_of(page(name))) + "\n")


@pytest.mark.parametrize("name", CASES)
def test_a_page_as_a_card(name, golden):
    made = layout(page(name, is_short=True))
    json.dumps(made, allow_nan=False)
    golden(f"{name}.card", "\n".join(spread(made)) + "\n")


@pytest.mark.parametrize("name", ["stored-failed", "failure", "running", "killed", "starting-again", "no-cause"])
def test_a_gang_as_data(name, golden):
    known, where = CASES[name]
    golden(
        f"{name}.json", json.dumps(as_data(where, known, ["progress", "usage"]), indent=1, ensure_ascii=False) + "\n"
    )


def test_a_gang_without_records_as_data(golden):
    data = as_data(place(attempt=1, last=2), None, ["progress"])
    golden("no-records.json", json.dumps(data, indent=1) + "\n")


def test_a_feature_that_keeps_nothing_is_not_in_the_data():
    data = as_data(place(), a_gang(silent=None, usage={"nodes": {}}), ["progress", "usage"])
    assert ("silent" in data, data["progress"], data["usage"]) == (False, None, {"nodes": {}})


def test_each_golden_file_is_one_of_a_case():
    assert {path.stem for path in FOLDER.iterdir()} == {*CASES, "no-records"}


# --- what no golden file shows ----------------------------------------------------------------------


def test_what_is_on_a_card_and_not_on_a_terminal_is_a_chart_or_a_cell():
    """All sections have the same texts in both, where the page has the space."""
    for name in CASES:
        text = " ".join(" ".join(lines_of(page(name))).split())
        for section in page(name, is_short=True).sections:
            said = [part.text for part in section.parts if isinstance(part, Sentence)]
            assert [each for each in said if name != "many-nodes" and " ".join(each.split()) not in text] == []


class Late(Feature):
    name = "late"
    after = "ranks"

    def parts(self, kept, summary):
        return [Sentence(f"{kept['a']} {summary.outcome}")]


def test_a_feature_has_a_section_where_it_asks_for_one_and_harms_no_other():
    names = section_names([Late()])
    assert names == ["outcome", "ranks", "late", "timeline", "nodes", "launch"]
    lines = lines_of(page_of(a_gang(late={"a": "kept"}), place(), [Late()]))
    assert lines[lines.index("Late") + 1] == "kept running"
    of_older = lines_of(page_of(a_gang(late={}), place(), [Late()]))
    assert "This can't be shown: KeyError: 'a'" in of_older
    assert of_older.index("Nodes") > of_older.index("Late")


@pytest.mark.parametrize("missing", [{3}, {2, 3}])
def test_a_rank_whose_exit_code_nobody_knows_is_listed_all_the_same(missing):
    told = [each for each in FAILURE if each[1] != "exited" or each[2]["rank"] not in missing]
    of_node_1 = as_data(place(), snapshot(told, report()))["nodes"][1]
    assert of_node_1["exit_codes"] == {"2": None if 2 in missing else 1, "3": None}
    (row,) = [line for line in lines_of(page_of(snapshot(told), place())) if line.startswith("   1  gpu-2")]
    assert row.endswith(" unknown")


def test_the_ranks_that_torchruns_own_elasticity_has_moved_are_those_that_ended():
    told = [(at_s, kind, {**of, "rank": of["rank"] - 2} if of.get("node") == 1 and "rank" in of else of)
            for at_s, kind, of in FAILURE]  # fmt: skip
    assert [rank.rank for rank in snapshot(told).summary.by_node[1]] == [0, 1]


def test_a_rank_has_the_node_of_its_end_or_else_by_the_number_of_processes():
    told = [*JOINED, (3.0, "go", {}), (4.0, "exited", {"node": 0, "rank": 5, "exit_code": 0})]
    found = snapshot(told).summary
    assert [found.node_of(rank) for rank in (5, 0, 3, 4, 99)] == [0, 0, 1, None, None]
    assert Snapshot().summary.node_of(0) is None


@pytest.mark.parametrize("kind", ["hang", "timeout", "lost", "restart", "preempted", "go", "before_run"])
def test_only_a_sentence_that_is_whole_without_it_loses_what_was_said_before(kind):
    twice = snapshot([(at, kind, {"node": 1, "text": "the same"}) for at in (1.0, 2.0)])
    assert [what.endswith("the same") for _, _, what in timeline(twice.events)] == [True, True]


def test_a_gang_of_many_is_a_short_timeline():
    many = snapshot([(node / 100, "joined", {"node": node, "text": f"host-{node}"}) for node in range(256)])
    assert timeline(many.events) == [("0.0-2.5", "", "nodes 0-255 joined")]


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


def test_of_many_ranks_their_ends_are_counted():
    assert exit_codes([*[-15] * 7, 1, None]) == "7 x SIGTERM, 1 x 1, 1 x unknown"


def test_a_table_keeps_its_columns_whatever_is_in_it():
    lines = table(("name", "n", "rest"), [["模型🙂", "1", "x" * 90], ["a\x1b[31m\u0301", "10", ""]], right=("n",))
    assert lines == ["name     n  rest", "模型🙂   1  " + "x" * 90, "a?[31m\u0301  10"]


def test_nothing_that_is_shown_steers_a_terminal():
    cause = Cause("exception", 0, MARKUP, exception=MARKUP, detail=MARKUP).as_dict()
    gang = replace(failed(a_gang(host=MARKUP), 1, MARKUP), cause=cause, command=MARKUP, facts={"torch": MARKUP})
    for known in (gang, replace(gang, reports=(report(text=MARKUP), report(None, text=MARKUP)))):
        assert all(line.isprintable() or "\t" in line for line in lines_of(page_of(known, place(), FEATURES)))
