"""Where the time of an attempt went: how much of it was progress, and what restarts have cost. Pure.

At each moment the attempt is in one class, so the sums equal its time. The classes follow from what happens to the gang and
from rank 0's reported steps alone; `docs/metrics.md` defines them. A script that reports no step has no progress: "runs".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..texts import counted, duration

Class = Literal["own_code", "waiting", "start", "progress", "runs", "restarts", "end"]
_SAID = {
    "own_code": "the step's own code", "waiting": "waiting for nodes", "start": "start", "runs": "running", "end": "ending"
}  # fmt: skip
_LEAST_S = 0.5  # less is not said


@dataclass
class Goodput:
    """The classes of an attempt so far, in seconds since its begin."""

    seconds: dict[str, float] = field(default_factory=dict)  # by class, of what is over
    now: Class = "own_code"  # since then
    since_s: float = 0.0
    run_s: float | None = None  # since when all workers of a start run
    restarts: int = 0
    best: int | None = None  # the highest step of the launch
    best_s: float = 0.0  # when it was reported: what comes after it is progress only if another one does
    first: int | None = None  # the first step of this generation
    twice: int = 0  # steps that were done again, without those of this generation
    again: int = 0  # those

    def enter(self, what: Class, at_s: float) -> None:
        """End the present class, and begin another one. Progress ends with its last step; what follows is the end."""
        if self.now == "progress" and what != "end":
            self.enter("end", at_s)
        at, ended_s = self.since_s, self.best_s if self.now == "progress" else at_s
        if self.now in ("start", "restarts") and self.run_s is not None and self.best is None and what != "progress":
            self._add(self.now, self.run_s - at)  # no step was reported: it is over when all run
            self.now, at = "runs", self.run_s
        self._add(self.now, ended_s - at)
        self.now, self.since_s, self.run_s = what, ended_s, None

    def _add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def go(self, is_restart: bool, at_s: float) -> None:
        """Begin a generation."""
        self.twice, self.again, self.first = self.twice + self.again, 0, None
        if not is_restart:
            self.best = None
            self.enter("start", at_s)
            return
        self.restarts += 1
        self.enter("restarts", at_s)

    def restart(self) -> None:
        """Note that a restart follows: what came since the workers were told to end belongs to it."""
        self.now = "restarts"

    def all_run(self, at_s: float) -> None:
        """Note that all workers run."""
        self.run_s = at_s if self.run_s is None else self.run_s

    def step(self, step: int, at_s: float) -> None:
        """Note a step that rank 0 has done. There is progress when a generation comes further than those before it."""
        self.first = step if self.first is None else self.first
        if self.now == "restarts" and self.best is not None:
            self.again = max(0, min(step, self.best) - self.first + 1)
        if self.best is not None and step <= self.best:
            if self.now == "progress":  # they are counted anew, as in each epoch
                self.best_s = at_s
            return
        self.best, self.best_s = step, at_s
        if self.now in ("start", "restarts"):
            self.enter("progress", at_s)

    def until(self, now_s: float) -> dict[str, Any]:
        """Return what is known: seconds by class, their sum, the share of progress, restarts, steps done twice."""
        # While it runs, another step is in the making.
        closed = replace(self, seconds={**self.seconds}, best_s=now_s)
        closed.enter("end", now_s)
        progress = closed.seconds.get("progress")
        found: dict[str, Any] = {f"{name}_s": round(each, 3) for name, each in closed.seconds.items() if each > 0}
        share = None if progress is None or not now_s else round(progress / now_s, 4)
        return {
            **found,
            "total_s": round(now_s, 3),
            "share": share,
            "restarts": self.restarts,
            "twice": self.twice + self.again,
        }


def said(told: Mapping[str, Any]) -> str:
    """Return it in words: ``"91 % of 6 h 10 min was progress. Start 4 min; 2 restarts cost 21 min: …"``."""
    parts = {what: told.get(f"{what}_s", 0.0) for what in _SAID}
    costs = [f"{_SAID[what]} {duration(seconds)}" for what, seconds in parts.items() if seconds >= _LEAST_S]
    if told["restarts"]:
        were = "was" if told["twice"] == 1 else "were"
        again = f": {counted(told['twice'], 'step')} {were} done twice" if told["twice"] else ""
        costs.append(f"{counted(told['restarts'], 'restart')} cost {duration(told.get('restarts_s', 0.0))}{again}")
    share, whole, text = told["share"], duration(told["total_s"]), "; ".join(costs)
    if share is None:
        return f"Of {whole}: {text}." if text else ""
    return f"{100 * share:.0f} % of {whole} was progress." + (f" {text[0].upper()}{text[1:]}." if text else "")
