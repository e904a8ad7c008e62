"""When a process looks at what no event tells."""

from __future__ import annotations

import time

WATCH_S = 0.5
"""Seconds between two looks."""


def until_look(period_s: float = WATCH_S) -> float:
    """Return how many seconds are left until the next look, more than 0.

    Parts that use this, with periods that divide each other, wake up together. Waking up costs more than most looks do
    (0.4 ms of CPU on an idle machine), and the cores belong to the workers.
    """
    return period_s - time.monotonic() % period_s
