"""What can only be told at the end: a gang that began with the first test, and the sum of all cases."""

from __future__ import annotations

import pytest
from chaos_gang import LATE_S
from chaos_table import MEDIAN_S


def test_a_node_that_starts_30_s_late(late_gang, recorder):
    late_gang.await_launch(0)
    recorder.lasted("a node starts 30 s late", late_gang.end_well())
    control, member = (late_gang.note(f"node-{node}.json") for node in range(2))
    assert control["launches"][0]["seconds"] > LATE_S - 1  # it waited inside of run()
    assert member["launches"][0]["seconds"] < control["launches"][0]["seconds"] - LATE_S + 5


def test_the_median_over_all_cases_in_which_a_process_died(recorder):
    if recorder.median_s is None:
        pytest.skip("no such case was run")
    assert recorder.median_s <= MEDIAN_S, "\n".join(recorder.lines())
