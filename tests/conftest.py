"""Every test must leave the process as it found it."""

import os
import threading
import time

import metaflow  # noqa: F401 - it imports our modules, so it must come before them
import psutil
import pytest

pytest_plugins = ["flow_runs", "hosts"]

# How long what a test stopped has to be gone; a thread that was told to end needs a moment.
_SETTLE_S = 3.0


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that leaves a child process, a non-daemon thread or a changed environment."""
    environment, children, threads = _environment(), _children(), _threads()
    yield
    deadline = time.monotonic() + _SETTLE_S
    while (_children() - children or _threads() - threads) and time.monotonic() < deadline:
        time.sleep(0.02)
    leaked = _children() - children
    told = [_describe(child) for child in leaked]
    for child in leaked:  # or they would be blamed on the next test
        child.kill()
    psutil.wait_procs(leaked, timeout=_SETTLE_S)
    changed = {name for name, _ in environment.items() ^ _environment().items()}
    assert not told, f"left running: {told}"
    assert not _threads() - threads, "left threads"
    assert not changed, f"changed environment variables: {sorted(changed)}"


def _describe(child: psutil.Process) -> str:
    try:
        return f"{child.pid} ({child.status()}): {' '.join(child.cmdline())}"
    except psutil.Error:
        return str(child.pid)
