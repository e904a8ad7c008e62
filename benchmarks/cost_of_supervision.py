"""What `@torchrun` adds to a Metaflow task while its workers run: CPU, memory and threads beside a plain `@parallel` one.

The flows are real, and so are torchrun and its workers, which wait. All cases of one number of nodes run at the same
time and are measured in the same seconds. So whatever else the machine does, it does to all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

FLOW = Path(__file__).with_name("waiting_flow.py")
CASES = {
    "plain @parallel": (),
    'logs="node"': ("--with", "torchrun:logs=node"),
    'logs="all"': ("--with", "torchrun:logs=all"),
    'logs="all", card': ("--with", "torchrun:logs=all", "--with", "card:type=torchrun"),
}
START_S = 600.0
WINDOWS = 3


@dataclass
class Cost:
    """What one process used; the CPU is the median of some windows, in % of a core."""

    nodes: int
    case: str
    process: str
    cpu: float
    cpu_of_ended_children: float  # the card's processes, and what else it has started and waited for
    wakeups_per_s: float
    threads: int
    rss_mb: float
    pss_mb: float


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

    def watched(self) -> dict[str, psutil.Process]:
        """Return the processes to look at: the control node's task, the last member's, and a guardian."""
        tasks = [psutil.Process(int((self.folder / f"task-{node}").read_text())) for node in range(self.nodes)]
        found = {"control task": tasks[0]}
        if self.nodes > 1:
            found["member's task"] = tasks[-1]
        for child in tasks[-1].children():
            with suppress(psutil.Error):
                if any("node.guardian" in word for word in child.cmdline()):
                    found["guardian"] = child
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


def wakeups(pid: int) -> int:
    """Return how often the living threads of a process have waited for something and gone on."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


class Meter:
    """Looks at one process once in each window."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._looks = [self._look()]
        self._began = self._of_children()

    def look(self) -> None:
        """End a window."""
        self._looks.append(self._look())

    def _look(self) -> tuple[float, float, int]:
        pid = self._process.pid
        # The kernel's clock of another process's CPU time, in nanoseconds (clock_getcpuclockid(3)).
        return time.monotonic(), time.clock_gettime((~pid << 3) | 2), wakeups(pid)

    def _of_children(self) -> float:
        times = self._process.cpu_times()
        return times.children_user + times.children_system

    def cost(self, nodes: int, case: str, name: str) -> Cost:
        """Return what was used."""
        pairs = list(zip(self._looks, self._looks[1:], strict=False))
        begin, end = self._looks[0], self._looks[-1]
        memory = self._process.memory_full_info()
        return Cost(
            nodes,
            case,
            name,
            cpu=statistics.median(100 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs),
            cpu_of_ended_children=100 * (self._of_children() - self._began) / (end[0] - begin[0]),
            wakeups_per_s=(end[2] - begin[2]) / (end[0] - begin[0]),
            threads=self._process.num_threads(),
            rss_mb=memory.rss / 1e6,
            pss_mb=memory.pss / 1e6,
        )


def measure(nodes: int, cases: list[str], seconds: float, settle_s: float) -> list[Cost]:
    """Run all cases at once and return what their processes used."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as runs_end:
        runs = []
        for number, case in enumerate(cases):
            runs.append(Run(case, nodes, Path(folder) / str(number)))
            runs_end.callback(runs[-1].end)
            runs[-1].await_workers()
        time.sleep(settle_s)
        meters = {(run.case, name): Meter(process) for run in runs for name, process in run.watched().items()}
        for _ in range(WINDOWS):
            time.sleep(seconds / WINDOWS)
            for meter in meters.values():
                meter.look()
        return [meter.cost(nodes, *key) for key, meter in meters.items()]


def facts() -> dict[str, str | int]:
    """Return what the figures depend on."""
    return {
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.release().partition('-')[0]}, {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("metaflow", "torch")},
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def show(costs: list[Cost]) -> None:
    """Print a table."""
    print("nodes  case               process          CPU %  children %  wakeups/s  threads  RSS MB  PSS MB")
    for cost in costs:
        print(
            f"{cost.nodes:5}  {cost.case:18} {cost.process:14} {cost.cpu:7.2f} {cost.cpu_of_ended_children:11.2f} "
            f"{cost.wakeups_per_s:10.1f} {cost.threads:8} {cost.rss_mb:7.1f} {cost.pss_mb:7.1f}",
            flush=True,
        )


def main() -> None:
    """Measure each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure each number of nodes")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds between the last worker's begin and that")
    parser.add_argument("--json", type=Path, help="file for all figures")
    given = parser.parse_args()
    about, costs = facts(), []
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for nodes in given.nodes:
        costs += (found := measure(nodes, given.cases, given.seconds, given.settle))
        show(found)
    if given.json is not None:
        given.json.write_text(json.dumps({"facts": about, "costs": [asdict(cost) for cost in costs]}, indent=1))


if __name__ == "__main__":
    main()
