"""`torchrun show` and `torchrun logs`, on one real run: a success, an attempt that failed, a foreach, a failure."""

from __future__ import annotations

import json
import re
import signal

import pytest

pytestmark = pytest.mark.xdist_group("seen")


@pytest.fixture(scope="module")
def seen(start_shared_flow):
    """Run the flow to its failure in the last gang."""
    flow = start_shared_flow(flow="seen.py", stand_in=True)
    assert flow.wait() == 1, flow.text
    assert "exited with code 3" in flow.text, flow.text
    return flow


@pytest.fixture
def ask(seen):
    return seen.ask


@pytest.fixture
def run(seen):
    return seen.note("run")


def test_a_failure_is_shown_with_its_cause_first_its_nodes_and_its_restart(ask, run):
    assert "Failed (trained" in ask("show", f"{run}/hurt", "--follow", expect=1)
    lines = ask("show", f"{run}/hurt").splitlines()
    assert re.match(rf"SeenFlow, run {run}, step hurt, task \d+, as of ", lines[0])
    assert re.match(r"Failed \(trained \d+ s, with start \d+ s\), after 1 restart: Rank 1 on node 1 ", lines[2])
    assert lines[4] == "Cause"
    assert " exited with code 3; the last line of its stderr: " in lines[2]
    assert "  | about to leave" in lines[6:9]
    rows = [line.split() for line in lines[lines.index("Nodes") + 2 :]][:2]
    assert [(row[0], row[3], row[4], row[5]) for row in rows] == [
        ("0", "0", "failed", "SIGTERM"),
        ("1", "1", "failed", "3"),
    ]
    told = [match[1] for line in lines if (match := re.match(r" *[\d.-]+  0\S* +(.*)", line))]
    starts = [text for text in told if text.startswith("start")]
    assert re.fullmatch(r"start on 2 nodes.*; start again on.*", "; ".join(starts))
    assert lines[-1].endswith(f"torchrun logs {run}/hurt --rank 1")
    before = lines.index("All workers start again after this.")
    assert re.match(
        r"After \d+ s: Rank 1 on node 1 .* exited with code 3; the last line of its stderr: .*\.$", lines[before - 1]
    )


def test_a_foreach_of_gangs(seen):
    assert seen.note("end") == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    last = [line.text for line in seen.lines if line.stream == "stderr"][-1]
    assert last.endswith(f"torchrun show {seen.note('run')}/hurt"), "the step whose gang has failed"


def test_the_gangs_of_a_foreach_are_shown_one_after_another_each_with_its_last_attempt(seen, ask, run):
    text = ask("show", f"{run}/train")
    attempts = {seen.note("letter-a"): "", seen.note("letter-b"): ", attempt 1"}
    titles = re.findall(r"^SeenFlow, run .*, task (\d+)(.*), as of ", text, re.MULTILINE)
    assert titles == sorted(attempts.items(), key=lambda item: int(item[0]))
    assert text.count("2 ranks on 2 nodes have ended well") == 2


def test_an_attempt_before_is_shown_with_the_traceback_of_its_cause(seen, ask, run):
    task = seen.note("letter-b")
    text = ask("show", f"{run}/train/{task}", "--attempt", "0")
    assert f"task {task}, attempt 0 (the latest is 1), as of " in text
    assert re.search(r"failed at \S+\.py:\d+ with ValueError: bad löss", text)
    assert '  |     raise ValueError("bad löss\\nsecond line")' in text
    assert f"torchrun logs {run}/train/{task} --attempt 0" in text


def test_logs_of_all_nodes_come_by_time_and_can_be_chosen(seen, ask, run):
    lines = ask("logs", f"{run}/hurt").splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in lines)
    assert [line[:12] for line in lines] == sorted(line[:12] for line in lines)
    assert {text for line in lines if "[torchrun node" in line for text in re.findall(r"node \d", line)[:1]} == {
        "node 0",
        "node 1",
    }
    of_rank = ask("logs", f"{run}/hurt", "--rank", "1").splitlines()
    assert [line[14:] for line in of_rank] == ["[rank 1] about to leave"] * 2
    assert ask("logs", f"{run}/hurt", "--rank", "1", "--tail", "1").splitlines() == of_rank[-1:]
    of_node = ask("logs", f"{run}/hurt", "--node", "1", "--follow").splitlines()
    assert set(of_rank) < set(of_node)
    assert not any("[rank 0]" in line for line in of_node)
    assert "The gang has no rank 4. It has ranks 0, 1." in ask("logs", f"{run}/hurt", "--rank", "4", expect=1)

    where = f"{run}/train/{seen.note('letter-a')}"
    found = [json.loads(line) for line in ask("logs", where, "--json").splitlines()]
    assert {(line["rank"], line["node"]) for line in found if "heard" in line["text"]} == {(0, 0), (1, 1)}
    assert "step of a *🙂*" in [line["text"] for line in found]


def test_who_follows_a_gang_that_has_not_begun_waits_for_it(start_flow):
    waiting, interrupted = (start_flow("show", "--follow", command="torchrun") for _ in range(2))
    for each in (waiting, interrupted):
        each.await_text("No run of GangFlow was started here.")
        each.await_text("Waiting for it; Ctrl-C ends this.")
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.wait() == 0, interrupted.text
    assert interrupted.lines[-1].text.endswith("Ctrl-C ends this."), interrupted.text
    flow = start_flow(stand_in=True)
    assert flow.wait() == 0, flow.text
    assert waiting.wait() == 0, waiting.text
    assert waiting.text.count("Waiting for it") == 1, waiting.text
    assert "ended well" in waiting.text
