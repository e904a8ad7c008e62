"""What the control node records of a gang's life."""

import re
from pathlib import Path
from typing import get_args

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.history import History, Kind, Record, Report, of_the_gang
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")


def made(count=0):
    now = iter(range(10**9))
    history = History(lambda: float(next(now)), lambda: 1000.0)
    for number in range(count):
        history.note("output", node=number)
    return history


def test_a_record_has_seconds_since_the_begin_and_the_time_of_day():
    history = made()
    history.note("exited", launch=1, generation=0, node=2, rank=5, exit_code=-9, text="killed by SIGKILL")
    (record,) = history.records
    assert record == Record("exited", 1.0, 1001.0, 1, 0, 2, 5, -9, "killed by SIGKILL")
    of_an_earlier_version = {"kind": "go", "at_s": 1.0, "time": 2.0}
    assert from_plain(Record, of_an_earlier_version, "a record") == Record("go", 1.0, 2.0)


@pytest.mark.parametrize("count", [0, 5, 4000, 4001, 10_000, 10_003, 25_000])
def test_what_was_noted_since_a_mark_is_there_but_for_the_middle_of_a_long_life(count):
    history = made(count)
    numbers = [*range(min(count, 4000)), *range(max(4000, count - 6000), count)]
    assert history.records == history.since(0)
    for mark in (0, 3, 3999, 4000, 4001, 5000, 15_000, 18_999, 19_000, 19_001, 24_999, count - 1, count):
        found = history.since(mark)
        kept = [each for each in numbers if each >= mark]
        missing = count - max(mark, 0) - len(kept)
        assert [record.node for record in found if record.kind == "output"] == kept
        left_out = {index: record.text for index, record in enumerate(found) if record.kind == "omitted"}
        assert left_out == ({max(0, 4000 - mark): f"{missing} records are left out here"} if missing > 0 else {})


def test_the_last_starts_among_the_dropped_records_are_kept():
    history = made(3990)
    for number in range(900):
        history.note("go", launch=number)
        for node in range(30):
            history.note("output", node=node)
    gos = [record.launch for record in history.records if record.kind == "go"]
    assert gos == [0, *range(gos[1], 900)]
    in_last = 6000 // 31
    assert 1 + 200 + in_last <= len(gos) <= 1 + 200 + in_last + 1
    since = [record.launch for record in history.since(20_000) if record.kind == "go"]
    assert since == gos[-len(since) :]
    assert gos[1] <= since[0] <= 20_000 // 31


def test_other_nodes_get_what_concerns_the_gang_of_very_many_the_first_and_the_last():
    history = made(2)
    for node in range(301):
        history.note("cause", node=node)
    found = of_the_gang(history.records)
    assert [record.node for record in found] == [*range(100), None, *range(101, 301)]
    assert found[100].text == "1 records are left out here"


def test_a_report_is_kept_once_and_cut_where_it_is_too_long():
    history = made()
    history.report(None, "Rank 1 failed", {"kind": "exit"}, 0, 0)
    for _ in "again", "when the gang breaks":
        history.report("LaunchFailed", "x" * 200_000, None, 0, 1)
    first, last = history.reports
    assert first == Report(1.0, 0, 0, None, "Rank 1 failed", {"kind": "exit"})
    assert last.text == "x" * 131_072 + "\n… 68928 characters are left out here"
    for number in range(30):  # of many the last
        history.report(None, f"failure {number}", None, 0, number)
    assert [report.generation for report in history.reports] == list(range(10, 30))


def test_the_page_lists_every_kind_and_every_field():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.split("## In the datastore")[0], re.MULTILINE)
    of_features = {"progress", "straggler", "recovered", "unreachable"}
    assert set(rows) == {*get_args(Kind), *of_features, *Record.__dataclass_fields__}
    rows = re.findall(r"^\| (`.*`) \|", PAGE.split("| field of a report |")[1].split("\n## ")[0], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(Report.__dataclass_fields__)
