"""Every test must leave the process as it found it."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import metaflow  # noqa: F401 - it imports our modules, so it must come before them
import psutil
import pytest
from limits import limit_s, measure

_UNIT = Path(__file__).parent / "unit"
pytest_plugins = ["hosts", "gangs", "flow_runs", "chromium"]

# How long what a test stopped has to be gone; a thread that was told to end needs a moment.
_SETTLE_S = 10.0
# A test that takes longer hangs.
_TEST_S = 180.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the golden files of tests/unit anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with the golden file of a name; git shows what `--renew-golden` changes."""

    def compare(name: str, text: str) -> None:
        path = _UNIT / "golden" / name
        if request.config.getoption("--renew-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), "if that is meant: pytest --renew-golden tests/unit"

    return compare


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout looks for its limit
def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `pytest &` has it ignored, which gangs inherit and heed
    places = [Path(arg.partition("::")[0]).absolute() for arg in config.args]
    measure(with_torch=not all(place.is_relative_to(_UNIT) for place in places))
    if config.option.timeout is None:
        config.option.timeout = limit_s(_TEST_S)


def pytest_report_header(config: pytest.Config) -> str:
    return measure(with_torch=False)  # it is measured already


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _UNIT not in item.path.parents:
            item.add_marker(pytest.mark.slow)
        if limit := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limit_s(limit.args[0])), append=False)
        if getattr(config.option, "loadgroup", False):
            _tell_group(item)


def _tell_group(item: pytest.Item) -> None:
    """Put a test's group into its id, where pytest-xdist looks for it.

    Version 3.8 does so itself, but in an attribute that pytest 9.2 no longer reads.
    """
    mark, identity = item.get_closest_marker("xdist_group"), getattr(item, "_id", None)
    if mark is None:
        return
    if hasattr(identity, "parse"):
        item._id = identity.parse(f"{item.nodeid}@{mark.args[0]}")  # type: ignore[attr-defined]
    assert item.nodeid.endswith(f"@{mark.args[0]}"), "pytest-xdist would not keep this group together"


# All that this process starts has this variable, also what is nobody's child any more, such as supervisors.
_MARK = "TORCHRUN_TESTED_BY"
os.environ[_MARK] = str(os.getpid())


def _pids() -> set[int]:
    return set(map(int, filter(str.isdigit, os.listdir("/proc"))))


def _started(before: set[int]) -> list[psutil.Process]:
    """Return what this process has started since, but for what processes have that were there before, as a browser has."""
    mark, found = f"{_MARK}={os.getpid()}".encode(), []
    for pid in _pids() - before:
        with suppress(OSError, psutil.Error):  # it has ended, or is another user's
            process = psutil.Process(pid)
            known = next((each.pid for each in process.parents() if each.pid in before), None)
            if known == os.getpid() or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that leaves a child process, a non-daemon thread or a changed environment."""
    environment, before, threads, tempdir = _environment(), _pids(), _threads(), tempfile.tempdir
    yield
    tempfile.tempdir = tempdir
    deadline = time.monotonic() + limit_s(_SETTLE_S)
    while ((leaked := _started(before)) or _threads() - threads) and time.monotonic() < deadline:
        time.sleep(0.02)
    told = [_describe(child) for child in leaked]
    for child in leaked:  # or they would be blamed on the next test
        child.kill()
    psutil.wait_procs(leaked, timeout=limit_s(_SETTLE_S))
    changed = {name for name, _ in environment.items() ^ _environment().items()}
    assert not told, f"left running: {told}"
    assert not _threads() - threads, "left threads"
    assert not changed, f"changed environment variables: {sorted(changed)}"


def _describe(child: psutil.Process) -> str:
    try:
        return f"{child.pid} ({child.status()}): {' '.join(child.cmdline())}"
    except psutil.Error:
        return str(child.pid)
