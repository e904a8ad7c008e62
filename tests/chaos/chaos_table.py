"""What the chaos suite measures, case by case, and the table it prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from gangs import SILENCE_S, Outcome
from limits import limit_s

# A process died or failed; a node fell silent; the gang went on as if nothing had been.
DIED, SILENT, LASTED = "died", "silent", "lasted"
# Less than the gang takes if it overlooks the fault and waits for silence.
NOTICED_S = SILENCE_S - 5.0


@dataclass
class Row:
    """One case."""

    name: str  # what was done
    kind: str  # what the gang had to do about it
    seconds: float | None  # from the fault until the last process was gone, without the grace; None: nothing had to end
    timeout_s: float  # how long this case has the gang wait for whoever is silent
    same: bool | None  # whether every node that could tell named the same cause; None: nothing had to be named
    left: int  # processes left over
    lost_bytes: int  # bytes of workers' output that are in no log


@dataclass
class Recorder:
    """Takes what each case has measured, and judges it."""

    rows: list[Row] = field(default_factory=list)

    def died(self, name: str, outcome: Outcome, grace_s: float = 0.0) -> None:
        """Note a case in which a process died or failed; `grace_s` is what the workers took of their grace."""
        self._add(name, DIED, outcome, outcome.seconds - grace_s)

    def silent(self, name: str, outcome: Outcome, timeout_s: float) -> None:
        """Note a case in which a node, or a part of it, fell silent."""
        self._add(name, SILENT, outcome, outcome.seconds, timeout_s)

    def lasted(self, name: str, outcome: Outcome) -> None:
        """Note a case that the gang had to survive."""
        self._add(name, LASTED, outcome)

    def _add(
        self, name: str, kind: str, outcome: Outcome, seconds: float | None = None, timeout_s: float = 0.0
    ) -> None:
        same = None if kind == LASTED else outcome.same
        self.rows.append(Row(name, kind, seconds, timeout_s, same, len(outcome.left), outcome.lost_bytes))
        assert not outcome.left, f"left behind: {outcome.left}"
        assert same is not False, f"the nodes do not say the same: {outcome.errors}"
        assert outcome.lost_bytes == 0, f"{outcome.lost_bytes} bytes of the workers' output are in no log"
        assert seconds is None or seconds < timeout_s + limit_s(NOTICED_S), f"took {seconds:.1f} s"

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]

    def lines(self) -> list[str]:
        """Return the result as Markdown: a table for each kind of case, and what holds for all of them."""
        lines: list[str] = []
        if died := [(row.name, f"{row.seconds:.1f}") for row in self.of_kind(DIED)]:
            each_s = [row.seconds for row in self.of_kind(DIED)]
            spread = f"median {statistics.median(each_s):.1f} s, worst {max(each_s):.1f} s"
            lines += [f"A process died or failed ({spread}):", "", *_table(("fault", "seconds"), died), ""]
        if silent := [(row.name, f"{row.seconds:.1f}", f"{row.timeout_s:g}") for row in self.of_kind(SILENT)]:
            lines += ["Something fell silent:", "", *_table(("fault", "seconds", "timeout"), silent), ""]
        if lasted := [f"- {row.name}" for row in self.of_kind(LASTED)]:
            lines += ["The gang went on:", "", *lasted, ""]
        named = [row.same for row in self.rows if row.same is not None]
        left, lost = sum(row.left for row in self.rows), sum(row.lost_bytes for row in self.rows)
        lines.append(f"All nodes that could tell named the same cause: in {sum(named)} of {len(named)} cases.")
        lines.append(f"Left over in all {len(self.rows)} cases: {left} processes; missing in the logs: {lost} bytes.")
        return lines


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
