"""Progress in a launch: from the workers' files to the gang, the log, and the result."""

import math

from fake_node import FakeNode
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.features.progress import in_task, watch
from metaflow_extensions.torchrun.plugins.torchrun.features.progress.told import Metrics, Point
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Ended, Report
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain
from metaflow_extensions.torchrun.plugins.torchrun.launch.services import Services


def test_a_worker_and_a_program_that_is_no_python_find_the_file_of_their_rank():
    found = watch.PART.variables(None, "/a $HOME")
    assert found.of_node == {"TORCHRUN_METRICS_FOLDER": "/a $HOME/metrics"}
    # torchrun makes one $ of two, and puts the rank in.
    assert found.of_rank == {"TORCHRUN_METRICS": "/a $$HOME/metrics/${local_rank}.jsonl"}


def test_what_workers_tell_is_told_while_they_run_and_at_their_end_before_that(tmp_path, monkeypatch):
    node = FakeNode(
        tmp_path, watches={"progress": watch.PART}, services=Services({"progress": in_task.PART.service(None)})
    )
    monkeypatch.setattr(watch, "TELLS_EVERY_S", 0.0)
    node.launch()
    agent = node.go()
    folder = node.agent_folder(agent) / "metrics"
    assert agent.env["TORCHRUN_METRICS_FOLDER"] == str(folder)

    def heard():
        message = node.expect(Report)
        assert (message.launch, message.generation, message.kind) == (0, 0, "progress")
        return from_plain(Metrics, message.data, "progress")

    write(folder / "0.jsonl", '{"step": 1, "loss": 3}\nnonsense\n')
    write(folder / "1.jsonl", '{"step": 2, "loss": 9}\n')
    node.report("started")  # so they run
    told = heard()
    assert told.points == {"loss": (Point(1, 3.0),)}
    assert {rank: pace.step for rank, pace in told.paces.items()} == {0: 1, 1: 2}
    eventually(lambda: [text for text in node.texts("note") if "nonsense" in text])
    monkeypatch.setattr(watch, "TELLS_EVERY_S", 1000.0)
    eventually(node.all_taken)
    write(folder / "0.jsonl", '{"step": 1, "loss": 3}\nnonsense\n{"step": 7, "loss": NaN}\n')
    node.all_end_well(agent)
    assert heard().points == {"loss": (Point(7, None),)}
    assert node.expect(Ended).ok
    told = {"last": {"loss": None, "step": 7}, "history": {"loss": [[1, 3.0], [7, None]]}}
    result = node.verdict(features={"progress": told})
    assert (math.isnan(result.metrics.pop("loss")), result.metrics) == (True, {"step": 7})
    (first, (step, value)) = result.history["loss"]
    assert (first, step, math.isnan(value)) == ((1, 3.0), 7, True)
