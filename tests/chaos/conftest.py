"""Hurts gangs of real processes and prints what it came to; see tests/chaos/README.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_table import Recorder

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
