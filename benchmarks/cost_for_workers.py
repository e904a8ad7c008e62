"""What `@torchrun` costs the workers: the same worker under torchrun alone and under `@torchrun`, one after the other.

One worker writes lines as fast as it can, another computes. Each measures itself: the CPU that it used, and for how
long it neither ran nor was ready to run, because something held it up. What it waited for a core is left out: that
tells of the machine's other work.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pairs import differences, in_turns
from report import Report, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

LINE = "x" * 99 + "\n"
BLOCK = b"x" * 4096
Result = dict[str, float]


# --- a worker ---------------------------------------------------------------------------------------


def write_lines(count: int) -> None:
    """Write lines of 100 bytes, each by a call of its own."""
    for _ in range(count):
        os.write(1, LINE.encode())


def compute(count: int) -> None:
    """Use the CPU alone."""
    for _ in range(count):
        hashlib.sha256(BLOCK).digest()


KINDS: dict[str, Callable[[int], None]] = {"writes": write_lines, "computes": compute}


def work(kind: str, count: int, path: str) -> None:
    """Do it, and leave what it took."""
    before = clocks()
    KINDS[kind](count)
    seconds, cpu, ready = (after - began for after, began in zip(clocks(), before, strict=True))
    Path(path).write_text(json.dumps({"CPU": cpu, "held up": seconds - cpu - ready}))


def clocks() -> tuple[float, float, float]:
    """Return seconds: what time it is, how long this thread has run, and how long it has waited for a core."""
    _, ready_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.monotonic(), time.thread_time(), int(ready_ns) / 1e9


# --- the two ways to start it -----------------------------------------------------------------------


def by_torchrun(do: str, folder: Path) -> None:
    """Let torchrun write the worker's output to files, as we do; nobody reads them."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        "--redirects",
        "3",
    ]
    command += ["--log-dir", str(folder), __file__]
    subprocess.run(command, env={**os.environ, "WORKER_DO": do}, check=True, stderr=subprocess.DEVNULL)


def by_us(do: str, folder: Path) -> None:
    """Start a gang of one node, whose log is a file."""
    from gangs import Gang

    gang = Gang(folder / "gang")
    try:
        gang.start(1, do=do, entrypoint=__file__)
        gang.processes[0].wait(600)
    finally:
        gang.kill()


WAYS = {"torchrun": by_torchrun, "@torchrun": by_us}


def measure(way: str, kind: str, count: int) -> Result:
    """Run one worker and return what it says."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        WAYS[way](json.dumps([kind, count, str(folder / "took.json")]), folder)
        took: Result = json.loads((folder / "took.json").read_text())
        return took


def main() -> None:
    """Measure in turns and compare within each round."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--lines", type=int, default=2_000_000)
    options.add_argument("--blocks", type=int, default=1_000_000, help="of 4 KiB, to compute with")
    given = options.parse_args()
    report = Report("the cost for the workers")
    for kind, count in (("writes", given.lines), ("computes", given.blocks)):
        variants = {way: partial(measure, way, kind, count) for way in WAYS}
        taken = in_turns(variants, given.rounds)
        for what in ("CPU", "held up"):
            values = {way: [result[what] for result in results] for way, results in taken.items()}
            for way in WAYS:
                report.add(f"a worker that {kind}, {what}: {way}", values[way])
            more = differences(values["@torchrun"], values["torchrun"])
            report.add(f"a worker that {kind}, {what}: more under @torchrun", more)
    report.finish(given.json)


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(*json.loads(os.environ["WORKER_DO"]))
    else:
        main()
