"""How far a launch is, and how fast its ranks are, in words. Pure.

What it is told of is what `kept.Progress.as_dict` has made, as the datastore has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...gang.texts import duration


def number(value: float | None) -> str:
    """Return a number with four digits at most, as a person writes it."""
    if value is None or not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def step(progress: Mapping[str, Any]) -> str:
    """Return ``"step 120 of 1000 (12 %)"``, or ``"120 of 1000 steps (12 %)"`` of steps that count from 0."""
    last, total = progress["step"], progress["total"]
    if last is None:
        return ""
    if total is None:
        return f"step {last}"
    done = _done(progress)
    said = f"step {last} of {number(total)}" if done == last else f"{done} of {number(total)} steps"
    return f"{said} ({percent(progress)} %)"


def _done(progress: Mapping[str, Any]) -> int:
    """Return how many steps are done; what is stored of older versions does not say it."""
    done: int | None = progress.get("done")
    return (progress["step"] or 0) if done is None else done


def percent(progress: Mapping[str, Any]) -> int:
    """Return how much is done; needs a total."""
    done: float = 100 * _done(progress) / progress["total"]
    return math.floor(max(0.0, min(100.0, done)))


def speed(progress: Mapping[str, Any]) -> str:
    """Return how fast rank 0 is, or nothing."""
    steps_per_s = progress["steps_per_s"]
    return "" if steps_per_s is None else _of(steps_per_s, "steps_per_s")


def left(progress: Mapping[str, Any]) -> str:
    """Return how long it will take, or nothing."""
    return "" if progress["left_s"] is None else f"{duration(progress['left_s'])} left"


def rates(progress: Mapping[str, Any]) -> str:
    """Return the speeds of all ranks, or nothing where one rank alone tells its steps."""
    found = progress["rates"]
    if found is None or found["ranks"] < 2:
        return ""
    slowest, by = found["slowest"], found["by"]
    return (
        f"median of {found['ranks']} ranks: {_of(found['median'], by)}; slowest: rank {slowest['rank']} "
        f"(node {slowest['node']}), {_of(slowest['speed'], by)}"
    )


def stragglers(progress: Mapping[str, Any], hosts: Mapping[int, str]) -> list[str]:
    """Return a sentence for each rank that is much slower than the others."""
    found = (progress["rates"] or {}).get("stragglers", ())
    return [
        f"rank {each['rank']} (node {each['node']}, host {hosts.get(each['node'], 'unknown')}) {each['text']}"
        for each in found
    ]


def _of(speed: float, by: str) -> str:
    if by == "steps_per_s":
        return f"{speed:.2g} steps/s" if speed < 100 else f"{speed:.0f} steps/s"
    return f"{1 / speed:.2g} s for a step without waiting"
