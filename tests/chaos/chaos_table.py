"""What the chaos suite measures, case by case, and the table it prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gangs import Outcome

DIED, SILENT, LASTED = "died", "silent", "lasted"
Kind = Literal["died", "silent", "lasted"]
"""A process died or failed; a node fell silent; the gang went on as if nothing had been."""

WORST_S = 5.0
MEDIAN_S = 2.0
SILENCE_MARGIN_S = 5.0


@dataclass
class Row:
    """One case.

    Attributes
    ----------
    name : str
        What was done.
    kind : str
        What the gang had to do about it.
    seconds : float or None
        From the fault until the last process was gone, without the grace; None where nothing had to end.
    bound_s : float
        What this case allows.
    same : bool or None
        Whether every node that was there to tell named the same cause; None where nothing had to be named.
    left, lost_bytes : int
        Processes left over, bytes of workers' output that are in no log.
    """

    name: str
    kind: Kind
    seconds: float | None
    bound_s: float | None
    same: bool | None
    left: int
    lost_bytes: int


@dataclass
class Recorder:
    """Takes what each case has measured, and judges it."""

    rows: list[Row] = field(default_factory=list)

    def died(self, name: str, outcome: Outcome, grace_s: float = 0.0) -> None:
        """Note a case in which a process died or failed; `grace_s` is what the workers took of their grace."""
        seconds = (outcome.seconds or 0.0) - grace_s
        self._add(Row(name, DIED, seconds, WORST_S, outcome.same, len(outcome.left), outcome.lost_bytes), outcome)

    def silent(self, name: str, outcome: Outcome, timeout_s: float) -> None:
        """Note a case in which a node, or a part of it, fell silent."""
        bound_s = timeout_s + SILENCE_MARGIN_S
        self._add(
            Row(name, SILENT, outcome.seconds, bound_s, outcome.same, len(outcome.left), outcome.lost_bytes), outcome
        )

    def lasted(self, name: str, outcome: Outcome) -> None:
        """Note a case that the gang had to survive."""
        self._add(Row(name, LASTED, None, None, None, len(outcome.left), outcome.lost_bytes), outcome)

    def _add(self, row: Row, outcome: Outcome) -> None:
        self.rows.append(row)
        assert not outcome.left, f"left behind: {outcome.left}"
        assert row.same is not False, f"the nodes do not say the same: {outcome.errors}"
        assert row.lost_bytes == 0, f"{row.lost_bytes} bytes of the workers' output are in no log"
        assert row.seconds is None or row.bound_s is None or row.seconds <= row.bound_s, f"took {row.seconds:.1f} s"

    @property
    def median_s(self) -> float | None:
        """Median over the cases where a process died."""
        died = [row.seconds for row in self.rows if row.kind == DIED and row.seconds is not None]
        return statistics.median(died) if died else None

    @property
    def worst_s(self) -> float | None:
        """The worst of the same."""
        return max((row.seconds for row in self.rows if row.kind == DIED and row.seconds is not None), default=None)

    def lines(self) -> list[str]:
        """Return the result as Markdown: a table for each kind of case, and what holds for all of them."""
        died, silent, lasted = ([row for row in self.rows if row.kind == kind] for kind in (DIED, SILENT, LASTED))
        lines: list[str] = []
        if died:
            spread = f"{WORST_S:g} s are allowed; median {self.median_s:.1f} s, worst {self.worst_s:.1f} s"
            cells = [(row.name, f"{row.seconds:.1f}") for row in died]
            lines += [f"A process died or failed ({spread}):", "", *_table(("fault", "seconds"), cells), ""]
        if silent:
            timed = [(row.name, f"{row.seconds:.1f}", f"{row.bound_s:g}") for row in silent]
            lines += ["Something fell silent:", "", *_table(("fault", "seconds", "allowed"), timed), ""]
        if lasted:
            lines += ["The gang went on:", "", *(f"- {row.name}" for row in lasted), ""]
        named = [row.same for row in self.rows if row.same is not None]
        left, lost = sum(row.left for row in self.rows), sum(row.lost_bytes for row in self.rows)
        lines.append(f"All nodes that could tell named the same cause: in {sum(named)} of {len(named)} cases.")
        lines.append(f"Left over in all {len(self.rows)} cases: {left} processes; missing in the logs: {lost} bytes.")
        return lines


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
