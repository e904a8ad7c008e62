"""A gang of a thousand: the benchmark's members are the real ones, and all of them must get in."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "many_nodes.py"
MEMBERS, STRANGERS = 1000, 2000


@pytest.mark.skipif(
    0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < MEMBERS + STRANGERS + 100, reason="too few open files"
)
def test_all_get_in_and_hear_the_end_whatever_strangers_do_beside_them():
    numbers = ["--members", str(MEMBERS), "--strangers", str(STRANGERS), "--files", "300"]
    done = subprocess.run([sys.executable, BENCHMARK, *numbers], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # no traceback of a callback either
    assert f"{MEMBERS}.00" in done.stdout.splitlines()[0]
