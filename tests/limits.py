"""Limits of tests: they end what hangs, and judge no speed.

A test states what a quiet machine with two cores needs in no case. On a slower or a busy machine `limit_s` makes that
longer. What seconds a gang takes is printed by the chaos suite and the benchmarks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

# Set for all processes of a session: pytest-xdist's workers and the flows measure nothing.
_VARIABLE = "TESTS_SLOWNESS"
# What is measured: a program, how often it runs, and the seconds that it takes on a quiet machine with two cores.
_PLAIN = ("import asyncio", 10, 0.5)
_TORCH = ("import torch", 1, 2.2)
# Some tests wait for what takes as long as their limit, so a moment of great load must not make hours of them.
_MOST = 10.0


def limit_s(quiet_s: float) -> float:
    """Return the limit on this machine where `quiet_s` is the limit on a quiet one."""
    return quiet_s * float(os.environ.get(_VARIABLE, "1"))


def eventually(done: Callable[[], Value], what: str | Callable[[], str] = "it", within_s: float | None = None) -> Value:
    """Return the first true value of `done()`; fail if there is none in time, by default in a minute of a quiet machine."""
    within_s = limit_s(60.0) if within_s is None else within_s
    deadline, pause_s = time.monotonic() + within_s, 0.01
    while not (value := done()):
        told = what if isinstance(what, str) else what()
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {told}"
        time.sleep(pause_s)
        pause_s = min(0.1, 1.5 * pause_s)
    return value


def measure(with_torch: bool) -> str:
    """Measure once in a session how slow this machine is, and return that for people; ``TESTS_SLOWNESS=3`` sets it."""
    if _VARIABLE not in os.environ:
        program, count, quiet_s = _TORCH if with_torch and _run(_TORCH[0]) else _PLAIN
        begun = time.monotonic()
        for _ in range(count):
            _run(program)
        slowness = (time.monotonic() - begun) / quiet_s
        os.environ[_VARIABLE] = f"{min(max(1.0, slowness), _MOST):.2f}"
    return f"limits: {os.environ[_VARIABLE]} times those of a quiet machine with two cores"


def _run(program: str) -> bool:
    """Run a Python program; the first run of one with torch also compiles it, so it is no measure."""
    return subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL, check=False).returncode == 0
