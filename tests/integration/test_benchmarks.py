"""The flow of the benchmarks runs, and the times that they compare are noted; what these are is tested nowhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from flow_runs import STAND_IN

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import output
import starting

pytestmark = pytest.mark.long


@pytest.mark.parametrize("heat", [None, starting.COLD])
def test_the_flow_notes_when_each_node_begins_each_launch(heat, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    launches = [starting.Launch({"entrypoint": str(starting.HERE / "empty_worker.py")}, after_s) for after_s in (0, 1)]
    took = starting.by_flow(tmp_path, starting.Shape(2, 1), launches, heat)
    first, second = (starting.last(tmp_path, f"begin-{launch}-*") for launch in (0, 1))
    assert 1.0 < second - first < took.seconds
    assert len(list(tmp_path.glob("begin-*"))) == 4
    assert took.cpu_s > 0.5  # six processes import Metaflow
    assert ("launch 1 has ended well" in (tmp_path / "log").read_text()) == (heat is not None)


def test_a_flow_that_fails_ends_the_benchmark_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    with pytest.raises(SystemExit, match="no-such-worker"):
        starting.by_flow(tmp_path, starting.Shape(1, 1), [starting.Launch({"entrypoint": "no-such-worker"})], "cold")


def test_torchrun_alone_notes_its_begin_and_its_workers_their_first_collective(tmp_path):
    took = starting.by_torchrun(tmp_path, starting.Shape(1, 2), starting.HERE / "collective_worker.py")
    begun, done = starting.last(tmp_path, "begin-0-*"), starting.last(tmp_path, "collective-0-0-*")
    assert 0 < done - begun < took.seconds
    assert len(list(tmp_path.glob("collective-0-0-?"))) == 2


@pytest.mark.parametrize("by", [output.by_cat, output.by_us])
def test_all_that_workers_write_is_read_and_timed(by, tmp_path):
    told = by(tmp_path, "short lines", 100_000)
    assert (tmp_path / "out").read_bytes().count(b"of the epoch") == pytest.approx(4 * 1000, abs=8)
    assert told["reading"] >= 0
    assert told["writing"] > 0


@pytest.mark.parametrize("words", output.FLOWS.values(), ids=output.FLOWS)
def test_metaflow_shows_all_that_a_step_or_its_workers_write(words, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    told = output.by_flow(tmp_path, "short lines", 100_000, words)
    assert (tmp_path / "log").read_text().count("of the epoch") == 4 * 1000
    assert told["seconds"] > 0
    assert told["peak_mb"] > 10
