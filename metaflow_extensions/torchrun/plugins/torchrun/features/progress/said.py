"""Progress in words, for the log and the page. Pure; its input is the result of `keep.ProgressKeeper.record`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...gang.texts import duration
from .stragglers import speed_text

_VALUES = 4  # in one line of the log


def said(progress: Mapping[str, Any]) -> str:
    """Return ``"step 229 of 300 (76 %), 2.1 steps/s, 56 s left, loss 0.044"``, as far as it is known."""
    values = [f"{key} {number(value)}" for key, value in progress["last"].items()]
    more = [f"and {len(values) - _VALUES} more values"] if len(values) > _VALUES else []
    return ", ".join(filter(None, (step(progress), *speed(progress), *values[:_VALUES], *more)))


def speed(progress: Mapping[str, Any]) -> list[str]:
    """Return rank 0's speed and the time left, those that are known."""
    per_s, left_s = progress["steps_per_s"], progress["left_s"]
    found = [] if per_s is None else [speed_text(per_s, "steps_per_s")]
    return found if left_s is None else [*found, f"{duration(left_s)} left"]


def number(value: float | None) -> str:
    """Return a number with at most four significant digits."""
    if value is None or not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def step(progress: Mapping[str, Any]) -> str:
    """Return ``"step 120 of 1000 (12 %)"``, or ``"120 of 120 steps (100 %)"`` where the last step was 119."""
    last, total, done = progress["step"], progress["total"], _done(progress)
    if last is None:
        return ""
    if total is None:
        return f"step {last}"
    told = f"step {last} of {number(total)}" if done == last else f"{done} of {number(total)} steps"
    return f"{told} ({percent(progress)} %)"


def percent(progress: Mapping[str, Any]) -> int:
    """Return the share of the steps that is done."""
    done: float = 100 * _done(progress) / progress["total"]
    return math.floor(max(0.0, min(100.0, done)))


def _done(progress: Mapping[str, Any]) -> int:
    """Return the number of steps done; records of older versions lack it."""
    done: int | None = progress.get("done")
    return (progress["step"] or 0) if done is None else done
