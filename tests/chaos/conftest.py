"""Hurts gangs of real processes and prints what it came to; see docs/chaos.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos_gang import LATE_S, Gang
from chaos_table import Recorder
from hosts import Host

HERE = Path(__file__).parent
_recorder = pytest.StashKey[Recorder]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-table", metavar="FILE", help="write the chaos suite's table to FILE, as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_recorder] = Recorder()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    recorder = config.stash[_recorder]
    if recorder.rows:
        lines = recorder.lines()
        terminalreporter.section("chaos")
        for line in lines:
            terminalreporter.write_line(line)
        if path := config.getoption("--chaos-table"):
            Path(path).write_text("\n".join(lines) + "\n")


@pytest.fixture
def recorder(pytestconfig: pytest.Config) -> Recorder:
    return pytestconfig.stash[_recorder]


@pytest.fixture
def make_gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    """Return a function that makes a gang; at the end of the test nothing of it is left."""
    made: list[Gang] = []

    def make(hosts: list[Host] | None = None, out: Path | None = None) -> Gang:
        made.append(Gang(out or tmp_path / f"gang-{len(made)}", hosts or ()))
        return made[-1]

    yield make
    for gang in made:
        gang.kill()


@pytest.fixture
def gang(make_gang: Callable[..., Gang]) -> Gang:
    """Return a gang whose nodes talk over this machine's loopback interface."""
    return make_gang()


@pytest.fixture(scope="session", autouse=True)
def late_gang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang | None]:
    """Return a gang whose second node starts 30 s after the first; it begins with the first chaos test."""
    if not any(item.name == "test_a_node_that_starts_30_s_late" for item in request.session.items):
        yield None
        return
    gang = Gang(tmp_path_factory.mktemp("late"))
    gang.start(do="*:talk-for 1", late={1: LATE_S}, detached=True)
    yield gang
    gang.kill()
