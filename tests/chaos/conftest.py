"""Hurts gangs of real processes and prints what it came to; see tests/chaos/README.md."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from gangs import SILENCE_S, Outcome
from limits import limit_s

# Less than the gang takes if it overlooks the fault and waits for silence.
NOTICED_S = SILENCE_S - 5.0


class Recorder:
    """Takes what each case has measured, and judges it."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str]] = []
        self._died_s: list[float] = []

    def died(self, name: str, outcome: Outcome, grace_s: float = 0.0) -> None:
        """Note a case in which a process died or failed; `grace_s` is what the workers took of their grace."""
        self._died_s.append(outcome.seconds - grace_s)
        self._note(name, outcome, outcome.seconds - grace_s)

    def silent(self, name: str, outcome: Outcome, timeout_s: float) -> None:
        """Note a case in which a node, or a part of it, fell silent; the gang waits for it so long."""
        self._note(name, outcome, outcome.seconds, timeout_s)

    def lasted(self, name: str, outcome: Outcome) -> None:
        """Note a case that the gang had to survive."""
        self._note(name, outcome)

    def _note(self, name: str, outcome: Outcome, seconds: float | None = None, timeout_s: float = 0.0) -> None:
        took = "goes on" if seconds is None else f"{seconds:.1f}"
        self._rows.append((name, took, f"{timeout_s:g}" if timeout_s else ""))
        assert not outcome.left, f"left behind: {outcome.left}"
        assert outcome.lost_bytes == 0, f"{outcome.lost_bytes} bytes of the workers' output are in no log"
        if seconds is not None:
            assert outcome.same is not False, f"the nodes do not say the same: {outcome.errors}"
            assert seconds < timeout_s + limit_s(NOTICED_S), f"took {seconds:.1f} s"

    def lines(self) -> list[str]:
        """Return all cases as a table in Markdown."""
        if not self._rows:
            return []
        table = [("fault", "seconds", "timeout"), ("---", "---:", "---:"), *self._rows]
        lines = ["| " + " | ".join(cells) + " |" for cells in table]
        if self._died_s:
            median_s, worst_s = statistics.median(self._died_s), max(self._died_s)
            lines.append(f"\nAfter a death: median {median_s:.1f} s, worst {worst_s:.1f} s.")
        return lines


_RECORDER = pytest.StashKey[Recorder]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-table", metavar="FILE", help="write the chaos suite's table to FILE, as Markdown")
    parser.addoption("--campaign", metavar="NODESxKILLS", default="4x3", help="how large test_campaign.py is")
    parser.addoption("--chaos-warm", metavar="WARM", help="what gangs fork: agent (as ever), workers or False")


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.parent == Path(__file__).parent:
        item.add_marker(pytest.mark.chaos)


@pytest.fixture(scope="session")
def recorder(pytestconfig: pytest.Config) -> Recorder:
    """Return what takes the rows of the table, in the order of the tests: one process runs them."""
    return pytestconfig.stash.setdefault(_RECORDER, Recorder())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_RECORDER, Recorder()).lines()
    terminalreporter.section("chaos")
    terminalreporter.write("\n".join([*lines, ""]))
    if path := config.getoption("--chaos-table"):
        Path(path).write_text("\n".join(lines) + "\n")
