"""Hurts gangs of real processes and prints what it came to; see docs/chaos.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from chaos_table import Recorder, Row

_ROW = "row of the chaos table"  # a test's rows travel in its report, since pytest-xdist runs it in another process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-table", metavar="FILE", help="write the chaos suite's table to FILE, as Markdown")
    parser.addoption("--campaign", metavar="NODESxKILLS", default="4x3", help="how large test_campaign.py is")
    parser.addoption("--chaos-warm", metavar="WARM", help="what gangs fork: agent (as ever), workers or False")


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.parent == Path(__file__).parent:
        item.add_marker(pytest.mark.chaos)


_reports: list[pytest.TestReport] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _reports.append(report)


def _all_rows() -> Recorder:
    """Return what all tests have measured, in the order of files and lines."""
    ordered = sorted(_reports, key=lambda report: report.location)
    rows = [value for report in ordered for name, value in report.user_properties if name == _ROW]
    return Recorder([Row(**row) for row in rows])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    recorder = _all_rows()
    if recorder.rows:
        lines = recorder.lines()
        terminalreporter.section("chaos")
        for line in lines:
            terminalreporter.write_line(line)
        if path := config.getoption("--chaos-table"):
            Path(path).write_text("\n".join(lines) + "\n")


@pytest.fixture
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """Return what takes this test's rows of the table."""
    recorder = Recorder()
    yield recorder
    request.node.user_properties += [(_ROW, asdict(row)) for row in recorder.rows]
