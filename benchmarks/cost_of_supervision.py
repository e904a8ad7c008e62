"""What `@torchrun` adds to a Metaflow task while its workers run: CPU, memory and threads beside a plain `@parallel` one.

The flows are real, and so are torchrun and its workers, which wait. All cases of one number of nodes run at the same
time and are measured in the same seconds. So whatever else the machine does, it does to all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from meter import Meter
from pairs import differences
from report import Report, parser
from starting import FLOW, HERE, flow_environment, start

WORKER = str(HERE / "waiting_worker.py")
PLAIN, CONTROL, MEMBER = "plain @parallel", "control task", "member's task"
CASES = {
    PLAIN: (),
    'logs="node"': ("--with", "torchrun:logs=node"),
    'logs="all"': ("--with", "torchrun:logs=all"),
    'logs="all", card': ("--with", "torchrun:logs=all", "--with", "card:type=torchrun"),
}
# What runs beside a task, and what stands in its command line; a supervisor's parent has the same.
BESIDE = {"supervisor": "between import main", "torchrun": "/worker/spare.py"}
COMPARED = ("CPU", "threads", "RSS", "PSS")
START_S = 600.0
# The targets: of an ordinary step, and of one with many nodes.
_FEW, _MOST_PERCENT, _MOST_OF_MANY, _MOST_MB = 2, 0.5, 1.0, 15.0


Costs = dict[tuple[str, str], dict[str, tuple[list[float], str]]]
"""Figures by case and process."""


class Run:
    """One run of the flow whose tasks all wait."""

    def __init__(self, case: str, nodes: int, folder: Path) -> None:
        self.case, self.nodes, self.folder = case, nodes, folder
        folder.mkdir()
        os.mkfifo(folder / "end")
        asked = {"nodes": nodes, "launches": [{"options": {"entrypoint": WORKER}, "after_s": 0}], "ranks_here": 1}
        command = [sys.executable, str(FLOW), "--no-pylint", "run", *CASES[case]]
        self._process = start(command, folder, flow_environment(folder, asked), "log")

    def await_workers(self) -> None:
        """Wait until all wait."""
        deadline = time.monotonic() + START_S
        while not all((self.folder / f"worker-{node}").exists() for node in range(self.nodes)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self.case} did not start:\n{(self.folder / 'log').read_text()[-4000:]}")
            time.sleep(0.1)

    def watched(self) -> dict[str, int]:
        """Return the processes to look at: the control node's task, the last member's, and what runs beside one."""
        tasks = [json.loads((self.folder / f"task-{node}.json").read_text())["pid"] for node in range(self.nodes)]
        found = {CONTROL: tasks[0]}
        if self.nodes > 1:
            found[MEMBER] = tasks[-1]
        for process in psutil.process_iter():  # none is a child of its task
            with suppress(psutil.Error):
                is_ours = process.environ().get("BENCHMARK_FOLDER") == str(self.folder)
                line = " ".join(process.cmdline()) if is_ours else ""
                found.update({name: process.pid for name, part in BESIDE.items() if part in line})
        if "supervisor" in found:  # of both, the child
            children = psutil.Process(found["supervisor"]).children()
            own = [each.pid for each in children if BESIDE["supervisor"] in " ".join(each.cmdline())]
            found["supervisor"] = (own or [found["supervisor"]])[0]
            found["between"] = psutil.Process(found["supervisor"]).ppid()
        return found

    def end(self) -> None:
        """Let all workers end, or kill the run if they don't."""
        with suppress(OSError):
            os.close(os.open(self.folder / "end", os.O_WRONLY | os.O_NONBLOCK))
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # the tasks and supervisors notice it, and end
            self._process.wait()


def measure(nodes: int, cases: Sequence[str], windows: int, seconds: float, settle_s: float) -> Costs:
    """Run all cases at once and return what their processes have used."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as runs_end:
        runs = []
        for number, case in enumerate(cases):
            runs.append(Run(case, nodes, Path(folder) / str(number)))
            runs_end.callback(runs[-1].end)
            runs[-1].await_workers()
        time.sleep(settle_s)
        meters = {(run.case, name): Meter(pid) for run in runs for name, pid in run.watched().items()}
        for _ in range(windows):
            time.sleep(seconds / windows)
            for meter in meters.values():
                meter.look()
        return {key: meter.figures() for key, meter in meters.items()}


def tell(report: Report, nodes: int, costs: Costs) -> None:
    """Add what was measured for one number of nodes: of each task how much more than the plain one's."""
    for (case, process), used in costs.items():
        plain = costs.get((PLAIN, process), {}) if case != PLAIN else {}
        most_percent = _MOST_PERCENT if nodes <= _FEW or process == MEMBER else _MOST_OF_MANY
        targets = {"CPU": most_percent, "RSS": _MOST_MB} if plain else {}
        for what, (values, unit) in used.items():
            is_more = what in plain and what in COMPARED
            more = differences(values, plain[what][0]) if is_more else values
            name = f"{nodes} nodes, {case}, {process}: {'more ' if is_more else ''}{what}"
            report.add(name, more, unit, targets.get(what))


def main() -> None:
    """Measure each number of nodes."""
    # `settle`: seconds between the last worker's begin and the measuring; `windows`: in how many parts that is.
    options = parser(__doc__, nodes=[1, 2, 8], cases=list(CASES), seconds=60.0, windows=7, settle=10.0)
    given = options.parse_args()
    report = Report("the cost of supervision")
    for nodes in given.nodes:
        tell(report, nodes, measure(nodes, given.cases, given.windows, given.seconds, given.settle))
    report.finish(given.json)


if __name__ == "__main__":
    main()
