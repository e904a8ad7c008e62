"""What `@torchrun` adds to a Metaflow task while its workers run: CPU, memory and threads beside a plain `@parallel` one.

The flows are real, and so are torchrun and its workers, which wait. All cases of one number of nodes run at the same
time and are measured in the same seconds. So whatever else the machine does, it does to all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from meter import Meter
from pairs import differences
from report import Report, parser

FLOW = Path(__file__).with_name("waiting_flow.py")
PLAIN, CONTROL, MEMBER = "plain @parallel", "control task", "member's task"
CASES = {
    PLAIN: (),
    'logs="node"': ("--with", "torchrun:logs=node"),
    'logs="all"': ("--with", "torchrun:logs=all"),
    'logs="all", card': ("--with", "torchrun:logs=all", "--with", "card:type=torchrun"),
}
# What runs beside a task, and what stands in its command line.
BESIDE = {"guardian": "guardian import main", "warm process": "-m torchrun_warm", "torchrun": "torch.distributed.run"}
START_S = 600.0
# The targets: of an ordinary step, and of one with many nodes.
_FEW, _MOST_PERCENT, _MOST_OF_MANY, _MOST_MB = 2, 0.5, 1.0, 15.0


class Cost(NamedTuple):
    """What one process used."""

    cpu: list[float]  # % of a core, of each window
    cpu_of_ended_children: float  # the card's processes, and what else it has started and waited for
    wakeups_per_s: float
    threads: int
    rss_mb: float
    pss_mb: float

    @staticmethod
    def of(meter: Meter) -> Cost:
        """Return what a process has used that still runs."""
        return Cost(
            meter.cpu_percent(),
            meter.cpu_of_ended_children(),
            meter.wakeups_per_s(),
            meter.threads(),
            *meter.memory_mb(),
        )


Measured = dict[tuple[str, str], Cost]
"""By case and process."""


class Run:
    """One run of the flow whose tasks all wait."""

    def __init__(self, case: str, nodes: int, folder: Path) -> None:
        self.case, self.nodes, self.folder = case, nodes, folder
        folder.mkdir()
        os.mkfifo(folder / "end")
        own = {
            "BENCHMARK_FOLDER": str(folder),
            "BENCHMARK_NODES": str(nodes),
            "METAFLOW_USER": "benchmark",
            "METAFLOW_DEFAULT_METADATA": "local",
            "METAFLOW_DEFAULT_DATASTORE": "local",
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("METAFLOW_")}
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(FLOW), "--no-pylint", "run", *CASES[case]],
                cwd=folder,
                env={**kept, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_workers(self) -> None:
        """Wait until all wait."""
        deadline = time.monotonic() + START_S
        while not all((self.folder / f"worker-{node}").exists() for node in range(self.nodes)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self.case} did not start:\n{(self.folder / 'log').read_text()[-4000:]}")
            time.sleep(0.1)

    def watched(self) -> dict[str, int]:
        """Return the processes to look at: the control node's task, the last member's, and what runs beside that."""
        tasks = [int((self.folder / f"task-{node}").read_text()) for node in range(self.nodes)]
        found = {CONTROL: tasks[0]}
        if self.nodes > 1:
            found[MEMBER] = tasks[-1]
        for process in psutil.Process(tasks[-1]).children(recursive=True):
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                found.update({name: process.pid for name, part in BESIDE.items() if part in line})
        return found

    def end(self) -> None:
        """Let all workers end, or kill the run if they don't."""
        with suppress(OSError):
            os.close(os.open(self.folder / "end", os.O_WRONLY | os.O_NONBLOCK))
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # the tasks and guardians notice it, and end
            self._process.wait()


def measure(nodes: int, cases: Sequence[str], windows: int, seconds: float, settle_s: float) -> Measured:
    """Run all cases at once and return the meters of their processes, by case and process."""
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
        return {key: Cost.of(meter) for key, meter in meters.items()}


def tell(report: Report, nodes: int, costs: Measured) -> None:
    """Add what was measured for one number of nodes: of each task how much more than the plain one's."""
    plain = {process: cost for (case, process), cost in costs.items() if case == PLAIN}
    for (case, process), cost in costs.items():
        name = f"{nodes} nodes, {case}, {process}"
        if case == PLAIN or process not in plain:
            report.add(f"{name}: CPU", cost.cpu, "%")
            report.add(f"{name}: RSS", [cost.rss_mb], "MB")
            report.add(f"{name}: PSS", [cost.pss_mb], "MB")
        else:
            other, limit = plain[process], _MOST_PERCENT if nodes <= _FEW or process == MEMBER else _MOST_OF_MANY
            report.add(f"{name}: more CPU", differences(cost.cpu, other.cpu), "%", limit)
            report.add(f"{name}: more RSS", [cost.rss_mb - other.rss_mb], "MB", _MOST_MB)
            report.add(f"{name}: more PSS", [cost.pss_mb - other.pss_mb], "MB")
            report.add(f"{name}: more threads", [cost.threads - other.threads], "")
        report.add(f"{name}: wakeups", [cost.wakeups_per_s], "/s")
        if cost.cpu_of_ended_children > 0:
            report.add(
                f"{name}: CPU of processes that it started and that have ended", [cost.cpu_of_ended_children], "%"
            )


def main() -> None:
    """Measure each number of nodes."""
    options = parser(__doc__)
    options.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 8])
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--seconds", type=float, default=60.0, help="how long to measure each number of nodes")
    options.add_argument("--windows", type=int, default=7, help="in how many parts")
    options.add_argument("--settle", type=float, default=10.0, help="seconds between the last worker's begin and that")
    given = options.parse_args()
    report = Report("the cost of supervision")
    for nodes in given.nodes:
        tell(report, nodes, measure(nodes, given.cases, given.windows, given.seconds, given.settle))
    report.finish(given.json)


if __name__ == "__main__":
    main()
