"""What the datastore has of a gang becomes a table, a timeline and a page."""

import json

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.history import Record
from metaflow_extensions.torchrun.plugins.torchrun.views.page import Facts, as_data, as_text, exit_codes, failed_rank
from metaflow_extensions.torchrun.plugins.torchrun.views.story import Story
from metaflow_extensions.torchrun.plugins.torchrun.views.table import table
from metaflow_extensions.torchrun.plugins.torchrun.views.timeline import timeline

BEGAN = 1_795_314_000.0
CAUSE = Cause(
    "exception", 1, "gpu-2", rank=2, exit_code=1, exception="ValueError: *nan* 🙂", detail="Traceback\n  boom"
)
WHAT = "Rank 2 on node 1 (host gpu-2) failed with ValueError: *nan* 🙂"


def records(*told):
    """Return records of what is told as (second, kind, fields)."""
    return [Record(kind, at_s, BEGAN + at_s, **fields) for at_s, kind, fields in told]


def launch(begin, codes, generation=0):
    """Return a launch from *go* to the ends of two nodes with two ranks each."""
    of = {"launch": 0, "generation": generation}
    ends = {0: "exited with code 0", 1: "exited with code 1", -15: "was killed by SIGTERM: somebody told it to stop"}
    exits = [
        (begin + 3 + rank, "exited", {**of, "node": rank // 2, "rank": rank, "exit_code": code, "text": ends[code]})
        for rank, code in enumerate(codes)
    ]
    gone = [(begin + 6.5, "stopped", {**of, "node": node}) for node in (0, 1)]
    return [
        (begin, "go", {**of, "text": "2 nodes, 2 processes on each"}),
        (begin + 1, "output", {**of, "node": 1}),
        (begin + 2, "output", {**of, "node": 0}),
        *([(begin + 2.5, "stopping", {**of, "text": WHAT})] if any(codes) else []),
        *exits,
        *gone,
    ]


JOINED = [
    (0.0, "joined", {"node": 0, "text": "gpu-1"}),
    (1.5, "joined", {"node": 1, "text": "gpu-2"}),
    (1.5, "ready", {"launch": 0, "generation": 0, "node": 0}),
    (2.0, "ready", {"launch": 0, "generation": 0, "node": 1}),
]
FAILED = (-15, -15, 1, -15)
OF_2 = {"launch": 0, "generation": 0, "node": 1, "rank": 2, "exit_code": 1, "text": WHAT}
ENDS = [(20.0, "left", {"node": 1}), (20.5, "left", {"node": 0})]
LEFT = [*((19.0, "finished", {"node": node}) for node in (0, 1)), *ENDS]
LEFT_FAILED = [(at_s, kind, {**fields, "text": "its step has failed"}) for at_s, kind, fields in ENDS]
SUCCESS = [*JOINED, *launch(2, (0, 0, 0, 0)), (9.0, "done", {"launch": 0, "generation": 0}), *LEFT]
FAILURE = [
    *JOINED,
    *launch(2, FAILED),
    (9.0, "cause", OF_2),
    (9.0, "failed", {"launch": 0, "generation": 0, "text": f"{WHAT}."}),
    *LEFT_FAILED,
]
RESTARTED = [
    *JOINED,
    *launch(2, FAILED),
    (9.0, "cause", OF_2),
    (9.0, "restart", {"launch": 0, "generation": 0, "text": "restart 1 of 2 in 1 s"}),
    *launch(10, (0, 0, 0, 0), generation=1),
    (18.0, "done", {"launch": 0, "generation": 1}),
    *LEFT,
]


def report(error="LaunchFailed"):
    text = f"{CAUSE.describe()}\nLaunch 0 was stopped on all nodes."
    return {"at_s": 9.0, "launch": 0, "generation": 0, "error": error, "text": text, "cause": CAUSE.as_dict()}


def content(told, *reports, num_nodes=2):
    events = [record.as_dict() for record in records(*told)]
    kept = {"version": 1, "num_nodes": num_nodes, "nproc_per_node": 2, "events": events, "reports": list(reports)}
    return json.loads(json.dumps(kept))


def facts(attempt=0, last=0, is_done=True):
    return Facts("12", "train", "4", {0: "4", 1: "4_node_1"}, attempt, last, is_done)


def page(told, *reports, now=BEGAN + 60, **options):
    return as_text(facts(**options), content(told, *reports), now)


def test_a_success_is_told_in_a_sentence_a_table_and_a_timeline():
    lines = page(SUCCESS)
    assert lines[0] == "Run 12, step train, task 4"
    assert lines[1] == "4 ranks on 2 nodes have ended well after 7 s."
    assert lines[2].startswith("2 nodes x 2, began 2026-")
    assert lines[4:8] == [
        "node  host   task      ranks  state     seconds  exit codes",
        "   0  gpu-1  4         0-1    finished     20.5  0 0",
        "   1  gpu-2  4_node_1  2-3    finished     18.5  0 0",
        "",
    ]
    assert lines[8:] == [
        "  seconds  launch  what happened",
        "  0.0-1.5          nodes 0, 1 joined",
        "  1.5-2.0  0       nodes 0, 1 called run",
        "      2.0  0       start: 2 nodes, 2 processes on each",
        "  3.0-4.0  0       nodes 0, 1: first output",
        "  5.0-8.0  0       ranks 0, 1, 2, 3 exited with code 0",
        "      9.0  0       the launch has ended well",
        "     19.0          nodes 0, 1: the step has ended well",
        "20.0-20.5          nodes 0, 1 left",
    ]


def test_what_a_second_launch_starts_with_is_told_although_it_is_the_same():
    told = timeline(records(*JOINED, *launch(2, (0, 0, 0, 0)), (9.0, "done", {"launch": 0}), *launch(10, (0, 0, 0, 0))))
    assert [what for _, _, what in told if what.startswith("start")] == ["start: 2 nodes, 2 processes on each"] * 2


@pytest.mark.parametrize("kind", ["hang", "timeout", "lost", "restart", "preempted", "go", "before_run"])
def test_only_a_sentence_that_is_whole_without_it_loses_what_was_said_before(kind):
    twice = [(at, kind, {"node": 1, "text": "the same"}) for at in (1.0, 2.0)]
    assert [what.endswith("the same") for _, _, what in timeline(records(*twice))] == [True, True]


def test_of_a_failure_the_cause_comes_first_with_its_traceback():
    lines = page(FAILURE, report())
    assert lines[1] == "Failed after 9 s."
    assert lines[4] == f"{WHAT}."
    assert lines[6:9] == ["  | Traceback", "  |   boom", "Launch 0 was stopped on all nodes."]
    assert "   0  gpu-1  4         0-1    failed     20.5  SIGTERM SIGTERM" in lines
    assert "   1  gpu-2  4_node_1  2-3    failed     18.5  1 SIGTERM" in lines
    # What the records say again and again is said once.
    assert [line.split("  ", 4)[-1] for line in lines if WHAT in line][1:] == [
        f"0       all workers are told to stop: {WHAT}"
    ]
    assert lines[-1] == "20.0-20.5          nodes 0, 1 left: their steps have failed"
    assert not any("cause" in line for line in lines[9:])
    assert "      9.0  0       the launch has failed" in lines
    assert "  5.0-8.0  0       ranks 0, 1, 3 were killed by SIGTERM" in lines
    assert "      7.0  0       rank 2 exited with code 1" in lines


def test_the_rank_that_failed_is_known():
    assert failed_rank(content(FAILURE, report())) == 2
    assert failed_rank(content(SUCCESS)) is None
    assert failed_rank(content(FAILURE, {**report(), "cause": None})) is None


def test_a_restart_tells_the_new_start_and_afterwards_why():
    lines = page(RESTARTED, report(error=None))
    assert lines[1] == "4 ranks on 2 nodes have ended well after 16 s, after 1 restart."
    assert lines[2].startswith("2 nodes x 2, 1 restart, began ")
    assert "      9.0  0       restart 1 of 2 in 1 s" in lines
    assert "     10.0  0.1     start again: 2 nodes, 2 processes on each" in lines
    assert lines[lines.index("At 9.0 s: all workers were started again after this") + 1] == f"{WHAT}."
    assert "   1  gpu-2  4_node_1  2-3    finished     18.5  0 0" in lines


def test_while_workers_start_again_their_ends_are_not_told():
    told = [record for record in RESTARTED if record[0] < 11]
    assert Story(content(told)).exit_codes == {0: {0: None, 1: None}, 1: {2: None, 3: None}}
    rows = [line for line in page(told, is_done=False) if line.startswith(("   0  gpu-1", "   1  gpu-2"))]
    assert [line.split()[-1] for line in rows] == ["60.0", "58.5"], "the seconds"
    assert Story(content([*JOINED, *launch(2, FAILED)])).exit_codes == {0: {0: -15, 1: -15}, 1: {2: 1, 3: -15}}


@pytest.mark.parametrize(
    ("missing", "row", "codes"),
    [
        ({3}, "1 unknown", {"2": 1, "3": None}),
        ({2, 3}, "unknown unknown", {"2": None, "3": None}),
        (set(), "1 SIGTERM", {"2": 1, "3": -15}),
    ],
)
def test_a_rank_whose_exit_code_nobody_knows_is_listed_all_the_same(missing, row, codes):
    told = [each for each in FAILURE if each[1] != "exited" or each[2]["rank"] not in missing]
    (line,) = [line for line in page(told, report()) if line.startswith("   1  gpu-2")]
    assert "  2-3    " in line
    assert line.endswith(f"  {row}")
    of_node_1 = as_data(facts(), content(told, report()), BEGAN + 60)["nodes"][1]
    assert (of_node_1["ranks"], of_node_1["exit_codes"]) == ([2, 3], codes)
    json.dumps(of_node_1)


def test_the_ranks_that_torchruns_own_elasticity_has_moved_are_those_that_ended():
    told = [(at_s, kind, {**of, "rank": of["rank"] - 2} if of.get("node") == 1 and "rank" in of else of)
            for at_s, kind, of in FAILURE]  # fmt: skip
    assert Story(content(told)).ranks_of(1) == [0, 1]


def test_an_error_that_the_step_has_caught_is_no_failure_of_the_gang():
    caught = [*FAILURE[: -len(LEFT_FAILED)], *LEFT]
    lines = page(caught, report())
    assert lines[1] == f"The step has ended well, though launch 0 had failed: {WHAT}."
    assert "At 9.0 s: run raised LaunchFailed" in lines


@pytest.mark.parametrize(
    ("options", "said", "seconds"),
    [
        ({"is_done": False}, "4 ranks on 2 nodes run for 58 s.", "60.0"),
        ({"is_done": True}, "4 ranks on 2 nodes run for 6 s.", "8.0"),
        ({"is_done": False, "last": 1}, "4 ranks on 2 nodes run for 6 s.", "8.0"),
    ],
)
def test_without_an_end_metaflow_tells_whether_it_runs(options, said, seconds):
    told = [*JOINED, *launch(2, (0, 0, 0, 0))[:-2]]
    lines = page(told, **options)
    assert lines[1].endswith(said)
    assert lines[2].endswith(", the last record is 52 s old")
    assert f"   0  gpu-1  4         0-1    running  {seconds:>7}  0 0" in lines
    assert ("attempt 0 (the latest is 1)" in lines[0]) == ("last" in options)
    assert as_data(facts(**options), content(told), BEGAN)["outcome"] == ("running" if "60" in seconds else "ended")


def test_nodes_that_never_came_or_were_lost_are_in_the_table():
    lost = (6.0, "lost", {"node": 1, "text": "its task has ended"})
    broken = (6.0, "broken", {"text": "Node 1 is lost"})
    lines = as_text(facts(), content([*JOINED, lost, broken], num_nodes=3), BEGAN)
    assert lines[1] == "Failed after 6 s: Node 1 is lost."
    assert "   1  gpu-2  4_node_1  2-3    lost            4.5" in lines
    assert "   2         -         4-5    not joined" in lines
    assert "    6.0          node 1 is lost: its task has ended" in lines


def test_stragglers_are_one_line_and_those_that_recover_another():
    slow = [(60.0 + rank, "straggler", {"rank": rank, "node": 1, "text": f"is slow: 0.{rank}"}) for rank in (1, 2, 3)]
    told = records(*slow, (200.0, "recovered", {"rank": 2, "node": 1, "text": "is no longer slow: 1"}))
    assert [what for _, _, what in timeline(told)] == [
        "ranks 1, 2, 3: slower than half the median for a minute",
        "rank 2: no longer slow",
    ]


def test_commands_before_the_workers_are_told_once_for_all_nodes_with_their_times():
    def ended(at_s, node, seconds, code=0, number=1):
        text = f"before_run {number}/2 (get https://x) exited with code {code}"
        return (at_s, "command", {"node": node, "launch": 0, "exit_code": code, "text": text, "seconds": seconds})

    told = [
        (1.0, "before_run", {"launch": 0, "generation": 0, "text": "commands on 3 nodes"}),
        *(ended(2.0 + node, node, 1.0 + node) for node in range(3)),
        ended(5.0, 1, 0.5, code=2, number=2),
        (5.0, "stopping", {"launch": 0, "text": "because"}),
        *((6.0, "stopped", {"node": node, "launch": 0}) for node in range(3)),
        (7.0, "failed", {"launch": 0, "text": "because"}),
        (8.0, "go", {"launch": 1, "generation": 0, "text": "3 nodes"}),
        (9.0, "stopping", {"launch": 1, "text": "of workers"}),
        (9.0, "stopped", {"node": 0, "launch": 1}),
    ]
    assert [what for _, _, what in timeline(records(*told))] == [
        "start: commands on 3 nodes",
        "nodes 0, 1, 2: before_run 1/2 (get https://x) exited with code 0, 1.0-3.0 s",
        "node 1: before_run 2/2 (get https://x) exited with code 2, 0.5 s",
        "all commands are told to stop: because",
        "nodes 0, 1, 2: all commands are gone",
        "the launch has failed",
        "start: 3 nodes",
        "all workers are told to stop: of workers",
        "node 0: all workers are gone",
    ]


def test_a_gang_of_many_is_a_short_timeline():
    many = [(node / 100, "joined", {"node": node, "text": f"host-{node}"}) for node in range(256)]
    assert timeline(records(*many)) == [("0.0-2.5", "", "nodes 0-255 joined")]


def test_of_many_ranks_their_ends_are_counted():
    assert exit_codes([*[-15] * 7, 1, None]) == "7 x SIGTERM, 1 x 1, 1 x unknown"


def test_a_rank_has_the_node_of_its_end_or_else_by_the_number_of_processes():
    story = Story(content([*JOINED, (3.0, "go", {}), (4.0, "exited", {"node": 0, "rank": 5, "exit_code": 0})]))
    assert [story.node_of(rank) for rank in (5, 0, 3, 4, 99)] == [0, 0, 1, None, None]
    assert Story({}).node_of(0) is None


def test_data_has_everything_as_plain_json():
    usage = {"step_s": 5.0, "nodes": {"0": {"cpus": [1.0]}}}
    data = json.loads(json.dumps(as_data(facts(), {**content(FAILURE, report()), "usage": usage}, BEGAN)))
    assert data["usage"] == usage
    assert (data["outcome"], data["began"], data["seconds"]) == ("failed", BEGAN, 20.5)
    assert data["nodes"][1] == {
        "node": 1,
        "host": "gpu-2",
        "task": "4_node_1",
        "ranks": [2, 3],
        "state": "failed",
        "seconds": 18.5,
        "exit_codes": {"2": 1, "3": -15},
    }
    assert data["reports"][0]["cause"] == CAUSE.as_dict()
    assert len(data["events"]) == len(FAILURE)


def test_data_of_a_gang_without_records_has_what_metaflow_has():
    data = as_data(facts(attempt=1, last=2), None, BEGAN)
    assert (data["outcome"], data["events"], data["attempt"], data["last_attempt"]) == (None, [], 1, 2)
    assert [(node["node"], node["task"], node["state"]) for node in data["nodes"]] == [
        (0, "4", None),
        (1, "4_node_1", None),
    ]


def test_what_a_later_version_tells_is_shown_as_it_is():
    told = [*JOINED, (3.0, "teleported", {"node": 1, "text": "to Mars"})]
    assert timeline(records(*told))[-1] == ("3.0", "", "teleported: to Mars")


def test_a_table_keeps_its_columns_whatever_is_in_it():
    lines = table(("name", "n", "rest"), [["模型🙂", "1", "x" * 90], ["a\x1b[31m\u0301", "10", ""]], right=("n",))
    assert lines == [
        "name     n  rest",
        "模型🙂   1  " + "x" * 90,
        "a?[31m\u0301  10",
    ]


# --- progress ---------------------------------------------------------------------------------------

TOLD = {
    "launch": 0, "step": 120, "total": 1000.0, "steps_per_s": 1.25, "left_s": 704.0,
    "last": {"loss": 0.123456, "epoch": 3.0, "lr": None}, "series": {"loss": [[120, 0.123456]]},
    "rates": {
        "by": "steps_per_s", "ranks": 4, "median": 1.2, "slowest": {"rank": 3, "node": 1, "speed": 0.4},
        "stragglers": [{"rank": 3, "node": 1, "speed": 0.4, "text": "is slow: 0.4 steps/s, the median is 1.2"}],
    },
}  # fmt: skip
RUNNING = [*JOINED, *launch(2, (0, 0, 0, 0))[:-6]]


def test_progress_is_told_after_the_outcome():
    told = {**content(RUNNING), "progress": TOLD}
    lines = as_text(facts(is_done=False), told, BEGAN + 5)
    assert lines[3:7] == [
        "Step 120 of 1000 (12 %), 1.2 steps/s, 11 min 44 s left",
        "Last values of rank 0: loss 0.1235, epoch 3, lr not finite",
        "Median of 4 ranks: 1.2 steps/s; slowest: rank 3 (node 1), 0.4 steps/s",
        "Rank 3 (node 1, host gpu-2) is slow: 0.4 steps/s, the median is 1.2",
    ]
    assert as_data(facts(is_done=False), told, BEGAN + 5)["progress"] == TOLD


def test_of_a_launch_that_is_over_nothing_is_left_and_no_rank_is_slow():
    lines = as_text(facts(), {**content(SUCCESS), "progress": TOLD}, BEGAN + 60)
    assert lines[3] == "Step 120 of 1000 (12 %), 1.2 steps/s"
    assert not [line for line in lines if "is slow" in line or " left," in line]


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ({"step": None, "last": {}, "rates": None, "steps_per_s": None}, []),
        ({"total": None, "last": {}, "rates": {**TOLD["rates"], "ranks": 1}}, ["Step 120, 1.2 steps/s"]),
        (
            {"step": 2000, "last": {"\x1b[31m": 1e-9}, "rates": {**TOLD["rates"], "by": "seconds"}, "left_s": None},
            [
                "Step 2000 of 1000 (100 %), 1.2 steps/s",
                "Last values of rank 0: ?[31m 1e-09",
                "Median of 4 ranks: 0.83 s for a step without waiting; slowest: rank 3 (node 1), 2.5 s for a step "
                "without waiting",
            ],
        ),
    ],
)
def test_what_is_not_known_of_progress_is_left_out(more, lines):
    told = {**content(SUCCESS), "progress": {**TOLD, **more}}
    assert as_text(facts(), told, BEGAN)[3 : 4 + len(lines)] == [*lines, ""]
