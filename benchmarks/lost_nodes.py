"""From the death of a node's task until all ranks of the next generation have passed their first barrier.

Three nodes with one worker each train, and the task of rank 1's node gets SIGKILL. A spare node comes, or the other two
go on. A new attempt (`@retry`) of the same flow is measured beside them. The kill comes when all spare processes of the
next generation wait.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from pairs import in_folder, in_turns, ratios
from report import Report, parser
from starting import FLOW, HERE, flow_environment, start

SCRIPT = HERE / "lost_worker.py"
NODES = 3
WAIT_S, LOOK_S = 300.0, 0.01
SPARE_S = 1.0
_IN_RECVMSG = ("unix", "skb_wait")  # where the kernel waits then; its function has another name in Linux 6.18


class Way(NamedTuple):
    """How a gang goes on."""

    attributes: str  # of `@torchrun`
    ranks: int = NODES  # of the next generation
    spare_nodes: int = 0
    spares: int = 2  # spare processes of a node
    options: tuple[str, ...] = ()  # of the flow


ATTEMPT = "a new attempt, warm workers"
WAYS = {
    "a spare node, warm workers": Way("max_restarts=1,warm=workers,spare_nodes=1", spare_nodes=1),
    "a spare node, warm agent": Way("max_restarts=1,warm=agent,spare_nodes=1", spare_nodes=1, spares=1),
    "fewer nodes, warm workers": Way("max_restarts=1,warm=workers,min_nodes=2", NODES - 1),
    # Spares of the next generation would cost it time: its processes are other ones.
    ATTEMPT: Way("warm=workers", spares=0, options=("--with", "retry:times=1,minutes_between_retries=0")),
}


@contextmanager
def running(folder: Path, way: Way) -> Iterator[subprocess.Popen[bytes]]:
    """Run the flow; at the end let its workers end, and wait for it."""
    launch = {"options": {"entrypoint": str(SCRIPT)}, "after_s": 0}
    nodes = NODES + way.spare_nodes
    asked = {"nodes": nodes, "launches": [launch]}
    words = ["--with", f"torchrun:nproc_per_node=1,grace_s=5,{way.attributes}", *way.options]
    process = start(
        [sys.executable, str(FLOW), "--no-pylint", "run", *words], folder, flow_environment(folder, asked), "log"
    )
    try:
        yield process
        (folder / "end").touch()
        process.wait(WAIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the tasks and supervisors notice it, and end
        process.wait()


def lose(folder: Path, way: Way) -> float:
    """Kill the task of one node, and return the seconds until all ranks have passed a barrier again."""
    with running(folder, way) as process:
        wait = partial(await_that, folder, process)
        wait(lambda: all(time_of(folder, rank) for rank in range(NODES)), "first barrier")
        count = way.spares * (NODES + way.spare_nodes)
        wait(lambda: count_spares(folder) >= count, "spares")
        (lost,) = folder.glob("rank-1-on-*")  # which nodes take part and which wait, their order of coming says
        node = lost.name.rpartition("-")[2]
        task = json.loads((folder / f"task-{node}.json").read_text(encoding="ascii"))["pid"]
        os.kill(task, signal.SIGKILL)
        struck = time.monotonic()
        wait(lambda: all(time_of(folder, rank) > struck for rank in range(way.ranks)), "barrier after the loss")
        seconds = max(time_of(folder, rank) for rank in range(way.ranks)) - struck
    if process.returncode != 0:
        sys.exit(f"the flow has failed:\n{tail(folder)}")
    return seconds


def time_of(folder: Path, rank: int) -> float:
    """Return when a rank has passed its last barrier; 0 if none."""
    path = folder / f"barrier-{rank}"
    return float(path.read_text(encoding="ascii")) if path.exists() else 0.0


def await_that(folder: Path, process: subprocess.Popen[bytes], condition: Callable[[], bool], what: str) -> None:
    """Wait while the flow runs."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"there was no {what}:\n{tail(folder)}")
        time.sleep(LOOK_S)


def count_spares(folder: Path) -> int:
    """Return how many spare processes of this flow wait for what they are to run."""
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if "/worker/spare.py" in " ".join(process.cmdline()):
                is_ours = process.environ().get("BENCHMARK_FOLDER") == str(folder)
                wchan = Path(f"/proc/{process.pid}/wchan").read_text()
                count += is_ours and any(word in wchan for word in _IN_RECVMSG)
    return count


def tail(folder: Path) -> str:
    """Return the end of the flow's log."""
    return (folder / "log").read_text(errors="replace")[-4000:]


def main() -> None:
    """Measure all ways in turns, and compare each with a new attempt."""
    given = parser(__doc__, rounds=5, ways=list(WAYS)).parse_args()
    report = Report("lost nodes")
    variants = {name: partial(in_folder, partial(lose, way=WAYS[name])) for name in given.ways}
    taken = in_turns(variants, given.rounds, lambda text: print(text, flush=True))
    for name, seconds in taken.items():
        print(f"{name}: {', '.join(f'{each:.2f}' for each in seconds)}", flush=True)
        report.add(name, seconds, target=SPARE_S if name == "a spare node, warm workers" else None)
        if name != ATTEMPT and ATTEMPT in taken:
            report.add(f"{name} / a new attempt", ratios(seconds, taken[ATTEMPT]), "")
    report.finish(given.json)


if __name__ == "__main__":
    main()
