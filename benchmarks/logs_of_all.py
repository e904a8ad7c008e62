"""What ``logs="all"`` costs the control node's task: its CPU while all nodes print, with it and without.

The nodes are processes of this machine, each with a real torchrun and one worker. Only the control node's task counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gangs import Gang


def cpu_s(pid: int) -> float:
    """Return what a process has used, without its children."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def measure(folder: Path, logs: str, nodes: int, lines: int, seconds: int) -> tuple[float, int]:
    """Return the task's part of a core, and how many lines its log has."""
    gang = Gang(folder)
    try:
        gang.start(nodes, do=f"{lines * seconds * 2} {lines}", entrypoint="writer.py", settings={"logs": logs})
        gang.await_that(lambda: "] writer 0 " in gang.log(0), "the first line")
        gang.await_that(lambda: all("] writer " in gang.log(node) for node in range(nodes)), "a line of each")
        before, begun = cpu_s(gang.task(0)), gang.log(0).count("\n")
        time.sleep(seconds)
        used, shown = cpu_s(gang.task(0)) - before, gang.log(0).count("\n") - begun
        return used / seconds, shown
    finally:
        gang.kill()


def main() -> None:
    """Measure each twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--lines", type=int, default=100, help="lines of 100 bytes that each node prints in a second")
    parser.add_argument("--seconds", type=int, default=30)
    given = parser.parse_args()
    for logs in ("node", "all", "node", "all"):
        with tempfile.TemporaryDirectory() as folder:
            part, shown = measure(Path(folder) / "gang", logs, given.nodes, given.lines, given.seconds)
        print(f"logs={logs!r}: {100 * part:.2f} % of a core, {shown / given.seconds:.0f} lines a second in its log")


if __name__ == "__main__":
    main()
