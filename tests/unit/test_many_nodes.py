"""A gang of a thousand: the benchmark's members are the real ones, and all of them must get in."""

import resource
import subprocess
import sys
from pathlib import Path

from gaps import gap

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "many_nodes.py"
MEMBERS, OTHERS = 1000, 2000


def test_all_get_in_and_hear_the_end_beside_unauthenticated_connections():
    files, limit = MEMBERS + OTHERS + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= limit < files:
        gap(f"This process may have {limit} open files, but {files} are needed.", f"Raise it: ulimit -Hn {files}.")
    numbers = ["--members", str(MEMBERS), "--unauthenticated", str(OTHERS), "--files", "300"]
    numbers += ["--rounds", "1", "--steady", "0.1"]
    done = subprocess.run([sys.executable, BENCHMARK, *numbers], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # no traceback of a callback either
    assert f"{MEMBERS} members: all have heard the verdict" in done.stdout
