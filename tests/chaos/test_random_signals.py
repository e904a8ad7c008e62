"""Signals at random moments, in any phase of a gang: all ends within its limits, with one cause, and nothing is left.

``RANDOM_SIGNALS=200`` tries so many gangs; by default there are a few.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from gangs import GRACE_S, NODE, Gang
from limits import limit_s

COUNT = int(os.environ.get("RANDOM_SIGNALS", "4"))
START_S = 10.0  # all_nodes_started_timeout
END_S = GRACE_S + 10.0
WORKER = str(NODE.parent / "worker.py")
POOL = f"import multiprocessing as m, runpy; pool = m.Pool(2); runpy.run_path({WORKER!r}, run_name='__main__')"
ENTRYPOINTS: list[str | list[str]] = ["worker.py", ["bash", "-c", f"python {WORKER}; true"], ["python", "-c", POOL]]
PHASES = ("joins, or begins to run", "own code", "runs", "ends")


def victim(gang: Gang, who: str, node: int) -> int:
    if who == "task":
        return gang.task(node)
    supervisor = gang.supervisor(node)
    return supervisor if who == "supervisor" else gang.between(node)


@pytest.mark.parametrize("seed", range(COUNT))
def test_a_gang_ends_whatever_gets_a_signal_and_when(seed: int, make_gang: Callable[..., Gang]) -> None:
    chance = random.Random(1000 + seed if "RANDOM_SIGNALS" in os.environ else seed)
    gang, phase = make_gang(), PHASES[seed % len(PHASES)]
    code = "wait" if phase == "own code" else ""
    launches = 0 if code else chance.choice([1, 2])
    gang.start(
        2,
        1,
        settings={"all_nodes_started_timeout": START_S},
        stand_in=True,
        launches=launches,
        own_code=dict.fromkeys((0, 1), code),
        entrypoint=chance.choice(ENTRYPOINTS),
    )
    node = chance.choice([0, 1])
    if phase == "own code":
        gang.await_steps()
    elif phase in ("runs", "ends"):
        gang.await_workers()
    if phase == "ends":
        (gang.out / "launch-1").touch()
        gang.let_go()
        gang.end_steps()
    time.sleep(chance.uniform(0.0, 2.0 if phase == PHASES[0] else 0.7))
    who = chance.choice(["task", "task", "task", "supervisor", "between"])
    number = signal.SIGKILL
    if who == "task":
        number = chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGKILL])
    told = f"seed {seed}: {who} of node {node} gets {number.name}; it {phase}"
    struck_at = time.monotonic()
    with suppress(ProcessLookupError, AssertionError):  # the gang has ended well before
        pid = victim(gang, who, node)
        gang.send(pid, number)
        if number == signal.SIGINT and chance.random() < 0.5:
            time.sleep(chance.uniform(0.0, 0.3))
            gang.send(pid, number)
    (gang.out / "launch-1").touch()
    gang.let_go()
    gang.end_steps()
    outcome = gang.await_end(struck_at, survivors=[], leaves_folders=who != "task" or number == signal.SIGKILL)
    limit = limit_s(END_S) + (START_S if phase == PHASES[0] else 0.0)
    assert outcome.seconds < limit, f"{told}: {outcome.seconds:.1f} s\n{gang.told}"
    assert not outcome.left, f"{told}: {outcome.left}\n{gang.told}"
    assert "bug in metaflow-torchrun" not in gang.told, told
    errors = [error for error in map(gang.error, (0, 1)) if error is not None]
    blamed = {error["cause"]["node"] for error in errors if error["cause"]}
    assert len(blamed) <= 1, f"{told}: nodes {blamed}\n{gang.told}"
