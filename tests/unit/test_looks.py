"""When a process looks at what no event tells."""

from __future__ import annotations

import time

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine.looks import until_look


@pytest.mark.parametrize("now", [0.0, 12.0, 12.25, 1e7 + 0.4999999])
def test_all_parts_of_a_process_look_at_the_same_moments(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for period_s in (0.01, 0.5, 1.0):
        left_s = until_look(period_s)
        assert 0 < left_s <= period_s
        assert (now + left_s) / period_s == pytest.approx(round((now + left_s) / period_s))
