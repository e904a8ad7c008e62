"""What the benchmarks share: the order of variants, ratios within a round, targets, and what is told of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import pairs  # noqa: E402
import report  # noqa: E402
import run_all  # noqa: E402


def test_variants_take_turns_and_every_second_round_runs_backwards():
    order = []

    def variant(name):
        return lambda: order.append(name) or len(order)

    taken = pairs.in_turns({name: variant(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abccbaabc"
    assert taken == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_a_ratio_is_one_within_a_round():
    assert pairs.ratios([1.0, 20.0], [2.0, 10.0]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="shorter"):
        pairs.ratios([1.0, 2.0], [1.0])


def test_a_difference_is_to_all_others_of_the_round_together():
    assert pairs.differences([5.0, 9.0], [1.0, 2.0], [2.0, 3.0]) == [2.0, 4.0]
    assert pairs.differences([5.0], [1.0]) == [4.0]


@pytest.mark.parametrize(
    ("values", "target", "at_least", "met"),
    [
        ((0.9, 9.0, 1.0), 1.0, False, True),
        ((1.1, 0.1, 1.2), 1.0, False, False),
        ((80.0,), 80.0, True, True),
        ((79.0,), 80.0, True, False),
        ((1.0,), None, False, None),
    ],
)
def test_the_median_decides_whether_a_target_is_met(values, target, at_least, met):
    assert report.Figure("it", values, "", target, at_least).met is met


def test_a_row_tells_median_spread_and_target():
    assert report.Figure("go", (0.0521, 0.049, 2.5), "s", 0.1).as_row() == [
        *("go", "0.052 s", "0.049 to 2.50", "3", "<= 0.100 s", "met")
    ]
    assert report.Figure("speed", (75.0,), "%", 80, at_least=True).as_row() == [
        *("speed", "75.00 %", "", "1", ">= 80.00 %", "**not met**")
    ]


def test_all_rows_of_a_table_are_equally_wide():
    lines = list(report.table(("a", "much wider"), [["longer than its head", "1"]]))
    assert {len(line) for line in lines} == {len(lines[0])}
    assert set(lines[1]) == set("| -")


def test_a_report_comes_back_from_its_json(tmp_path, capsys):
    told = report.Report("launches")
    told.add("cold", [2.0, 3.0, 4.0], "s", target=3.0)
    told.add("no target", [1.0])
    told.note("GPUs: skipped, there are none")
    told.finish(tmp_path / "told.json")
    shown = capsys.readouterr().out
    assert "| cold " in shown
    assert shown.endswith("GPUs: skipped, there are none\n")
    stored = json.loads((tmp_path / "told.json").read_text())
    assert stored["facts"].keys() >= {
        "CPU",
        "cores",
        "memory",
        "kernel",
        "Python",
        "torch",
        "load before",
        "load after",
    }
    assert stored["figures"][0]["median"] == 3.0
    assert stored["figures"][0]["met"] is True
    assert run_all.rows_of(tmp_path / "told.json") == [["launches", *told.figures[0].as_row()]]


def test_a_benchmark_that_fails_leaves_no_figures_of_an_earlier_run(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise SystemExit('broken')")
    (tmp_path / "broken.json").write_text("{}")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    assert run_all.run("broken.py", tmp_path) is None
    assert not (tmp_path / "broken.json").exists()
