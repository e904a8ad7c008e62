"""What is known of a gang, as it is stored: old records stay readable, and later ones as far as they are known."""

import json
from pathlib import Path

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.history import Record
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import VERSION, Snapshot

# Stored by a version that had no `Snapshot` (0.3 in development), of a gang of 2 x 2 that restarts and then fails.
STORED = sorted((Path(__file__).parent / "records").glob("*.json"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_an_old_record_is_read_whole_and_stored_as_it_was(path):
    stored = json.loads(path.read_text(encoding="utf-8"))
    known = Snapshot.read(stored)
    later = {"nproc": None, "group": None}  # fields that records did not have then
    expected = {**stored, "events": [{**each, **later} for each in stored["events"]]}
    assert json.loads(json.dumps(known.stored())) == expected
    assert (known.version, known.num_nodes, known.tasks) == (1, 2, ("12/train/4", "12/train/4_node_1"))
    of_outputs = {"outputs", "wants_outputs", "launches_left_out"}
    assert (len(known.summary.restarts_s), set(known.features)) == (1, {"progress", "usage"} | of_outputs)


@pytest.mark.parametrize(
    "events",
    [
        "x",
        [None],
        ["joined"],
        *([{"kind": "joined", "at_s": at_s, "time": 1.0}] for at_s in (-1, 1e18, 1e308)),
        *([{"kind": "joined", "at_s": 1.0, "time": moment}] for moment in (-1, 1e18, 1e308)),
    ],
)
def test_a_damaged_record_is_refused_as_such(events):
    with pytest.raises(ValueError, match="the record of the gang"):
        Snapshot.read({"events": events})


def test_what_an_old_record_lacks_has_a_default():
    assert Snapshot.read({"events": None, "reports": None}) == Snapshot()
    known = Snapshot.read({"events": [{"kind": "joined", "at_s": 0, "time": 1, "node": 0}], "cause": None})
    assert known == Snapshot(events=(Record("joined", 0.0, 1.0, node=0),))
    assert known.began == 1.0


def test_of_a_later_version_what_we_know_is_read():
    event = {**Record("joined", 0.5, 1000.5, node=0, text="a").as_dict(), "colour": "red"}
    known = Snapshot.read({"version": VERSION + 1, "num_nodes": 2, "events": [event], "weather": {"sun": 1}})
    assert known.events == (Record("joined", 0.5, 1000.5, node=0, text="a"),)
    assert (known.version, known.features) == (VERSION + 1, {"weather": {"sun": 1}})


def test_what_is_none_is_refused_by_the_name_of_its_field():
    with pytest.raises(ValueError, match=r"the record of the gang\.num_nodes is 'two'"):
        Snapshot.read({"num_nodes": "two"})


def test_values_that_are_not_finite_survive_json():
    known = Snapshot(2, features={"x": {"a": float("nan")}}, now_s=3.0)
    again = Snapshot.read(json.loads(json.dumps(known.stored(), allow_nan=False)))
    assert (again.features, again.now_s) == ({"x": {"a": None}}, 3.0)
