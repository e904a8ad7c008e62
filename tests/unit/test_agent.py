"""The agent's program, with a stand-in for torchrun: what it changes in the workers that torchrun starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.launch.command import AGENT, HALT_SIGNAL

STAND_IN = Path(__file__).parents[1] / "stand_in"
OPTIONS = ["--nnodes=1", "--node-rank=0", "--nproc-per-node=2", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=some"]


@pytest.mark.parametrize(("restarts", "seen"), [("2/3", "2 3"), ("", "0 0")])
def test_whatever_a_worker_starts_knows_the_restarts_of_the_gang(restarts, seen, tmp_path):
    """Also a wrapper that does not become the script's Python, as a profiler in PYTHON_EXEC."""
    shows = "sh -c 'echo $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $TORCHRUN_RESTARTS'"
    words = [f"--log-dir={tmp_path}", *OPTIONS, "--no-python", "--", "sh", "-c", shows]
    env = {**os.environ, "PYTHONPATH": str(STAND_IN), "TORCHRUN_RESTARTS": restarts}
    subprocess.run([sys.executable, AGENT, str(tmp_path), str(HALT_SIGNAL), *words], env=env, check=True, timeout=60)
    assert [(tmp_path / f"{rank}.stdout").read_text() for rank in (0, 1)] == [f"{seen}\n"] * 2
