"""A gang of a thousand: the benchmark's members are the real ones, and all of them must get in."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "many_nodes.py"
MEMBERS, OTHERS = 1000, 2000


@pytest.mark.skipif(
    0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < MEMBERS + OTHERS + 100, reason="too few open files"
)
def test_all_get_in_and_hear_the_end_beside_unauthenticated_connections():
    numbers = ["--members", str(MEMBERS), "--unauthenticated", str(OTHERS), "--files", "300"]
    numbers += ["--rounds", "1", "--steady", "0.1"]
    done = subprocess.run([sys.executable, BENCHMARK, *numbers], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # no traceback of a callback either
    assert f"{MEMBERS} members: all have heard the verdict" in done.stdout
