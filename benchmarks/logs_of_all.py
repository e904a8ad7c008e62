"""What ``logs="all"`` costs the control node's task: its CPU while all nodes print, with it and without.

The nodes are processes of this machine, each with a real torchrun and one worker. Only the control node's task counts.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from meter import Meter
from pairs import columns, in_folder, in_turns
from report import Report, parser

_SETTLE_S = 3.0  # after the first lines
_MOST_PERCENT = 1.0
FIGURES = {
    "CPU of the control task": ("%", _MOST_PERCENT),
    "its wakeups": ("/s", None),
    "lines in its log": ("/s", None),
}


def measure(folder: Path, logs: str, lines: int, nodes: int, seconds: float) -> dict[str, float]:
    """Run a gang whose workers each print so many lines a second."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from gangs import Gang

    gang = Gang(folder / "gang")
    try:
        gang.start(nodes, do=f"{lines * 1000} {lines}", entrypoint="writer.py", settings={"logs": logs})
        gang.await_that(lambda: all("] writer " in gang.log(node) for node in range(nodes)), "a line of each")
        time.sleep(_SETTLE_S)
        begun, meter = gang.log(0).count("\n"), Meter(gang.task(0))
        time.sleep(seconds)
        meter.look()
        shown, used = (gang.log(0).count("\n") - begun) / seconds, meter.figures()
        return dict(zip(FIGURES, (used["CPU"][0][0], used["wakeups"][0][0], shown), strict=True))
    finally:
        gang.kill()


def main() -> None:
    """Measure in turns: fewer lines and more, with those of all nodes and without."""
    given = parser(__doc__, rounds=3, nodes=8, lines=[1, 100], seconds=20.0).parse_args()
    report = Report("logs of all nodes")
    run = partial(measure, nodes=given.nodes, seconds=given.seconds)
    variants = {
        f'{given.nodes} nodes, lines/s of each {lines}, logs="{logs}"': partial(
            in_folder, partial(run, logs=logs, lines=lines)
        )
        for lines in given.lines
        for logs in ("node", "all")
    }
    for name, costs in in_turns(variants, given.rounds).items():
        for what, values in columns(costs).items():
            report.add(f"{name}: {what}", values, *FIGURES[what])
    report.finish(given.json)


if __name__ == "__main__":
    main()
