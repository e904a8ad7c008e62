"""What ``logs="all"`` costs the control node's task: its CPU while all nodes print, with it and without.

The nodes are processes of this machine, each with a real torchrun and one worker. Only the control node's task counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from meter import Meter
from pairs import in_turns
from report import Report, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

_SETTLE_S = 3.0  # after the first lines
_MOST_PERCENT = 1.0


class Cost(NamedTuple):
    """What the task of the control node used in a second, and how many lines its log got."""

    cpu_percent: float
    wakeups: float
    lines: float


def measure(logs: str, lines: int, nodes: int, seconds: float) -> Cost:
    """Run a gang whose workers each print so many lines a second."""
    from gangs import Gang

    with tempfile.TemporaryDirectory() as folder:
        gang = Gang(Path(folder) / "gang")
        try:
            gang.start(nodes, do=f"{lines * 1000} {lines}", entrypoint="writer.py", settings={"logs": logs})
            gang.await_that(lambda: all("] writer " in gang.log(node) for node in range(nodes)), "a line of each")
            time.sleep(_SETTLE_S)
            begun, meter = gang.log(0).count("\n"), Meter(gang.task(0))
            time.sleep(seconds)
            meter.look()
            (cpu,), shown = meter.cpu_percent(), gang.log(0).count("\n") - begun
            return Cost(cpu, meter.wakeups_per_s(), shown / meter.seconds)
        finally:
            gang.kill()


def main() -> None:
    """Measure in turns: fewer lines and more, with those of all nodes and without."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--nodes", type=int, default=8)
    options.add_argument("--lines", type=int, nargs="+", default=[1, 100], help="that each node prints in a second")
    options.add_argument("--seconds", type=float, default=20.0)
    given = options.parse_args()
    report = Report("logs of all nodes")
    variants = {
        f'{given.nodes} nodes, lines/s of each {lines}, logs="{logs}"': partial(
            measure, logs, lines, given.nodes, given.seconds
        )
        for lines in given.lines
        for logs in ("node", "all")
    }
    for name, costs in in_turns(variants, given.rounds).items():
        report.add(f"{name}: CPU of the control task", [cost.cpu_percent for cost in costs], "%", _MOST_PERCENT)
        report.add(f"{name}: its wakeups", [cost.wakeups for cost in costs], "/s")
        report.add(f"{name}: lines in its log", [cost.lines for cost in costs], "/s")
    report.finish(given.json)


if __name__ == "__main__":
    main()
