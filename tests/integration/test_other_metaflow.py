"""What who has no step of ours notices of us, and flows on a Metaflow that has renamed what we use, see tests/renamed.

``tests/unit/test_renamed.py`` tries each name.
"""

from __future__ import annotations

import subprocess
import sys

from flow_runs import RENAMED_TOGETHER, RENAMING, STAND_IN

PATH = f"{RENAMING}:{STAND_IN}"


def test_with_torchrun_nothing_is_scheduled_and_the_error_has_the_name(run_flow):
    """A name that only a card needs, long after the workers have begun."""
    flow = run_flow(expect=1, env={"PYTHONPATH": PATH, "RENAMED": "_card_component_store"}, timeout_s=170)
    assert "component_serializer._card_component_store, which this Metaflow (" in flow.text
    assert "Metaflow 2.13 to 2.19 works" in flow.text
    assert "Workflow starting" not in flow.text


def test_a_flow_without_a_step_of_ours_never_notices_us(run_flow):
    env = {"PYTHONPATH": PATH, "RENAMED": " ".join(RENAMED_TOGETHER.split())}
    flow = run_flow(flow="without.py", env=env, timeout_s=170)
    assert "[torchrun]" not in flow.text
    helped = run_flow(flow="without.py", command="--help", env=env, timeout_s=170)
    assert "torchrun" in helped.text, "the commands of all extensions are read for that"
    assert "Error" not in helped.text


PROCESS = """
import os, signal, sys, threading
def seen():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return handlers, threading.active_count(), os.listdir("/proc/self/fd"), sys.excepthook, dict(os.environ)
before = seen()
import metaflow
assert metaflow.torchrun
after = seen()
assert before == after, (before, after)
"""


def test_importing_metaflow_leaves_the_process_as_it_was():
    """No handler, thread, file, hook or variable is ours before a step is."""
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
