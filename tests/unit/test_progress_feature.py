"""Progress behind the seam: from the workers' files to the log, the records, the verdict and the result."""

import math

import pytest
from fake_node import FakeNode
from test_state import crash, running
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.features.progress import ranks
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.feature import Progress
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import Metrics, Pace, Point
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Ended, Started, Told, Verdict
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain, to_plain
from metaflow_extensions.torchrun.plugins.torchrun.node.watchers import keepers_of


def told(paces, losses=()):
    """Return what a node tells, as its message; losses are those of step 1 and on."""
    points = tuple(Point(step, loss) for step, loss in enumerate(losses, 1))
    return Told(0, 0, "progress", to_plain(Metrics(paces, {"loss": points} if points else {})))


def heard(message):
    """Return what a message tells."""
    assert (message.launch, message.generation, message.feature) == (0, 0, "progress")
    return from_plain(Metrics, message.data, "progress")


# --- the gang -----------------------------------------------------------------------------------


def running_gang(num_nodes):
    return running(num_nodes, keepers=keepers_of([Progress()], num_nodes))


def progress_of(gang):
    return gang.state.keepers.record()["progress"]


def run_with_speeds(gang, seconds, slow):
    """Let time go by, with paces of all nodes every 5 s; the first rank of the last node is so fast."""
    last = gang.num_nodes - 1
    for _ in range(int(seconds / 5)):
        for node in range(gang.num_nodes):
            gang.say(node, told({2 * node: Pace(5, slow if node == last else 1.0), 2 * node + 1: Pace(5, 1.0)}))
        gang.pass_time(5.0)


def test_a_straggler_is_told_in_one_line_and_a_record_and_so_is_its_recovery():
    gang = running_gang(3)
    run_with_speeds(gang, 60, 0.3)
    assert gang.notes(0) == []
    run_with_speeds(gang, 60, 0.3)
    said = "rank 4 (node 2, host host-2) is slow: 0.3 steps/s, the median is 1 steps/s"
    assert (gang.notes(0), gang.notes(2)) == ([said], [])
    run_with_speeds(gang, 100, 0.9)
    assert len(gang.notes(0)) == 2
    records = [each for each in gang.state.history.records if each.kind in ("straggler", "recovered")]
    assert [(each.kind, each.node, each.rank, each.launch, each.generation) for each in records] == [
        ("straggler", 2, 4, 0, 0),
        ("recovered", 2, 4, 0, 0),
    ]
    assert [each.text for each in records] == [line.partition(") ")[2] for line in gang.notes(0)]


@pytest.mark.parametrize("ends", [lambda gang: gang.ended(2), lambda gang: gang.all_ended()])
def test_ranks_that_end_are_no_stragglers(ends):
    gang = running_gang(3)
    run_with_speeds(gang, 60, 0.3)
    ends(gang)
    gang.pass_time(100.0)
    assert gang.notes(0) == []


@pytest.mark.parametrize("cause", [None, crash(1)])
def test_rank_0s_last_values_come_with_the_verdict_to_all_nodes(cause):
    gang = running_gang(2)
    gang.say(0, told({}, (3.0, None)))
    gang.say(1, told({2: Pace(2)}))
    gang.all_ended(*([cause] if cause else []))
    for node in (0, 1):
        assert [verdict.features for verdict in gang.got(node, Verdict)] == [{"progress": {"loss": None}}]


def test_what_comes_after_the_launch_is_too_late():
    gang = running_gang(2)
    gang.say(0, told({}, (3.0,)))
    gang.all_ended()
    gang.all_ready(1)
    gang.say(0, told({}, (9.0,)))
    assert progress_of(gang)["series"] == {"loss": [(1, 3.0)]}
    gang.all_ended(launch=1)
    assert [verdict.features for verdict in gang.got(0, Verdict)] == [{"progress": {"loss": 3.0}}, {}]


@pytest.mark.parametrize("data", [{"paces": 3}, {"paces": {"x": {"step": 1}}}, {"colour": "red"}])
def test_what_does_not_fit_ends_no_gang(data):
    gang = running_gang(2)
    gang.say(1, Told(0, 0, "progress", data))
    (line,) = gang.notes(0)
    assert "node 1's progress: ValueError: progress" in line
    gang.all_ended()
    assert [verdict.error for verdict in gang.got(1, Verdict)] == [None]


# --- a launch -----------------------------------------------------------------------------------


def test_a_program_that_is_no_python_gets_its_file_by_its_command(tmp_path):
    node = FakeNode(tmp_path, features=(Progress(),), spec={"options": (("no-python", None),)})
    node.launch()
    agent = node.go()
    assert f"TORCHRUN_METRICS={node.agent_folder(agent)}/metrics/${{local_rank}}.jsonl" in agent.command
    node.ends(agent)


def test_what_workers_tell_is_told_while_they_run_and_at_their_end_before_that(tmp_path, monkeypatch):
    node = FakeNode(tmp_path, features=(Progress(),))
    monkeypatch.setattr(ranks, "TELLS_EVERY_S", 0.0)
    node.launch()
    agent = node.go()
    folder = node.agent_folder(agent)
    assert agent.env["TORCHRUN_METRICS_FOLDER"] == str(folder / "metrics")
    write(folder / "metrics" / "0.jsonl", '{"step": 1, "loss": 3}\nnonsense\n')
    write(folder / "metrics" / "1.jsonl", '{"step": 2, "loss": 9}\n')
    node.expect(Started)  # so they run
    told = heard(node.expect(Told))
    assert told.points == {"loss": (Point(1, 3.0),)}
    assert {rank: pace.step for rank, pace in told.paces.items()} == {0: 1, 1: 2}
    eventually(lambda: [text for text in node.texts("note") if "nonsense" in text])
    monkeypatch.setattr(ranks, "TELLS_EVERY_S", 1000.0)
    eventually(node.all_taken)
    write(folder / "metrics" / "0.jsonl", '{"step": 1, "loss": 3}\nnonsense\n{"step": 7, "loss": NaN}\n')
    node.all_end_well(agent)
    assert heard(node.expect(Told)).points == {"loss": (Point(7, None),)}
    assert node.expect(Ended).ok
    result = node.verdict(features={"progress": {"loss": None, "lr": 0.5}})
    assert math.isnan(result.metrics.pop("loss"))
    assert result.metrics == {"lr": 0.5}


def test_without_progress_the_result_has_no_metrics():
    assert Progress().result({}) == {"metrics": {}}
