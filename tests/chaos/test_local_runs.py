"""The process of a local run is killed, as ``timeout``, systemd and schedulers do; its tasks are not to outlive it."""

from __future__ import annotations

import math
import os
import signal
import time

from gangs import END_S, Outcome
from limits import eventually, limit_s

GRACE_S = 2


def test_a_run_is_stopped_and_continued_at_its_terminal(start_flow, recorder):
    """Ctrl-Z reaches the run and its tasks; supervisors and workers have sessions of their own."""
    heartbeat_s = math.ceil(limit_s(2))
    flow = start_flow(attrs={"heartbeat_timeout_s": heartbeat_s, "grace_s": GRACE_S}, do="*:wait")
    flow.await_notes("worker-*", 2)
    os.killpg(flow.process.pid, signal.SIGSTOP)
    time.sleep(3 * heartbeat_s)
    os.killpg(flow.process.pid, signal.SIGCONT)
    begin = time.monotonic()
    time.sleep(2 * heartbeat_s)  # whoever took it for a failure says so now
    (flow.out / "go-launch0-0").touch()
    assert flow.wait() == 0, flow.text[-3000:]
    recorder.lasted(
        "Ctrl-Z for three times the heartbeat timeout, and fg", Outcome(time.monotonic() - begin, {}, [], 0)
    )


def test_the_process_of_the_run_is_killed(start_flow, recorder):
    flow = start_flow(attrs={"grace_s": GRACE_S}, do="*:ignore-sigterm,*:sleep")
    flow.await_notes("worker-*", 2)
    tasks = {note["pid"] for note in flow.notes("task-*")}
    os.kill(flow.process.pid, signal.SIGKILL)
    begin = time.monotonic()
    eventually(lambda: not tasks & {process.pid for process in flow.processes()}, within_s=limit_s(END_S))
    flow.process.wait()
    flow.await_gone()
    seconds = time.monotonic() - begin
    recorder.died("SIGKILL of the process of a local run", Outcome(seconds, {}, [], 0), GRACE_S)
    assert seconds > GRACE_S  # the workers, which ignore SIGTERM, had their time
