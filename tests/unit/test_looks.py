"""When a process looks at what no event tells."""

from __future__ import annotations

import time

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine.looks import WATCH_S, is_due, until_look


@pytest.mark.parametrize("now", [0.0, 12.0, 12.25, 1e7 + 0.4999999])
def test_all_parts_of_a_process_look_at_the_same_moments(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for period_s in (0.01, 0.5, 1.0):
        left_s = until_look(period_s)
        assert 0 < left_s <= period_s
        looks = (now + left_s) / period_s
        assert looks == pytest.approx(round(looks), rel=0, abs=1e-6)


@pytest.mark.parametrize("late_s", [-0.004, 0.0, 0.004, 0.2])
def test_the_look_nearest_to_the_moment_does_what_is_due(late_s: float) -> None:
    looks = [number * WATCH_S for number in range(1, 6)]
    done = [at for at in looks if is_due(1.0 + late_s - at)]
    assert done[0] == 1.0
