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
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pairs import columns, differences, in_folder, in_turns
from report import Report, parser

LINE = b"x" * 99 + b"\n"
BLOCK = b"x" * 4096
KINDS: dict[str, Callable[[], object]] = {
    "writes": lambda: os.write(1, LINE),
    "computes": lambda: hashlib.sha256(BLOCK).digest(),
}
Result = dict[str, float]


def work(kind: str, count: int, path: str) -> None:
    """Do one thing many times, and leave what it took."""
    before, do = clocks(), KINDS[kind]
    for _ in range(count):
        do()
    seconds, cpu, ready = (after - began for after, began in zip(clocks(), before, strict=True))
    Path(path).write_text(json.dumps({"CPU": cpu, "held up": seconds - cpu - ready}))


def clocks() -> tuple[float, float, float]:
    """Return seconds: what time it is, how long this thread has run, and how long it has waited for a core."""
    _, ready_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.monotonic(), time.thread_time(), int(ready_ns) / 1e9


def by_torchrun(do: str, folder: Path) -> None:
    """Let torchrun write the worker's output to files, as we do; nobody reads them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--redirects=3"]
    command += [f"--log-dir={folder}", __file__]
    subprocess.run(command, env={**os.environ, "WORKER_DO": do}, check=True, stderr=subprocess.DEVNULL)


def by_us(do: str, folder: Path) -> None:
    """Start a gang of one node, whose log is a file."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from gangs import Gang

    gang = Gang(folder / "gang")
    try:
        gang.start(1, do=do, entrypoint=__file__)
        gang.processes[0].wait(600)
    finally:
        gang.kill()


WAYS = {"torchrun": by_torchrun, "@torchrun": by_us}


def measure(folder: Path, way: str, kind: str, count: int) -> Result:
    """Run one worker and return what it says."""
    WAYS[way](json.dumps([kind, count, str(folder / "took.json")]), folder)
    took: Result = json.loads((folder / "took.json").read_text())
    return took


def main() -> None:
    """Measure in turns and compare within each round."""
    # Lines of 100 bytes, and blocks of 4 KiB to compute with.
    given = parser(__doc__, rounds=7, lines=2_000_000, blocks=1_000_000).parse_args()
    report = Report("the cost for the workers")
    for kind, count in (("writes", given.lines), ("computes", given.blocks)):
        variants = {way: partial(in_folder, partial(measure, way=way, kind=kind, count=count)) for way in WAYS}
        alone, ours = map(columns, in_turns(variants, given.rounds).values())
        for what in alone:
            report.add(f"a worker that {kind}, {what}: torchrun", alone[what])
            report.add(f"a worker that {kind}, {what}: @torchrun", ours[what])
            report.add(f"a worker that {kind}, {what}: more under @torchrun", differences(ours[what], alone[what]))
    report.finish(given.json)


if __name__ == "__main__":
    work(*json.loads(os.environ["WORKER_DO"])) if "RANK" in os.environ else main()
