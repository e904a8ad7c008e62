"""What much output costs: our part alone beside `torchrun … | cat`, and a whole flow beside a step that prints as much.

Our part is the thread that follows the workers' files and writes labelled lines, here to a file, as `cat` does. It is
as fast as what it reads in the time from the first look that has found something. Torchrun gives `cat` no labels to write.

In a flow, Metaflow's runtime reads the task's output line by line, stores it and shows it. That takes far longer, so
the flows write less. They count from the moment at which Metaflow shows the first line to that of the last. Lines are
printed one by one, and Metaflow has no task's Python buffer them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path

from output_worker import FIRST_LINE, KINDS, LAST_LINE
from pairs import differences, in_turns, ratios
from report import Report, parser
from starting import HERE, environment, flow_environment, to_the_end

RANKS = 4
WORKER = str(HERE / "output_worker.py")
FLOW = str(HERE / "output_flow.py")
CAT, OURS = "cat behind torchrun", "our part"
PLAIN, GANG = "a plain step", "@torchrun"
# In a flow; the task's own threads and what they hold.
MORE_MEMORY_MB = 20.0
Result = Mapping[str, float]


# --- our part alone ---------------------------------------------------------------------------------


def torchrun(*options: str) -> list[str]:
    """Return the command line of torchrun without what it runs."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", *options]


def by_cat(folder: Path, kind: str, size: int) -> Result:
    """Let `cat` read what torchrun's workers write to their common stdout."""
    with open(folder / "out", "wb") as out, open(folder / "log", "wb") as log:
        writing = subprocess.Popen(
            [*torchrun(), WORKER, kind, str(size)],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(folder),
            cwd=folder,
        )
        assert writing.stdout is not None
        reading = subprocess.Popen(["cat"], stdin=writing.stdout, stdout=out)
        writing.stdout.close()
    _, _, used = os.wait4(reading.pid, 0)
    return result_of(folder, writing.wait(), {"cpu": used.ru_utime + used.ru_stime})


def by_us(folder: Path, kind: str, size: int) -> Result:
    """Let a thread of ours follow the files that torchrun puts its workers' output in."""
    logs = folder / "logs"
    logs.mkdir()
    command = [sys.executable, str(HERE / "output_follower.py"), str(logs)]
    command += [*torchrun("--redirects=3", f"--log-dir={logs}"), WORKER, kind, str(size)]
    with open(folder / "out", "wb") as out, open(folder / "log", "wb") as log:
        code = subprocess.run(command, stdout=out, stderr=log, env=environment(folder), cwd=folder).returncode
    return result_of(folder, code, json.loads((folder / "reader.json").read_text()) if code == 0 else {})


def result_of(folder: Path, code: int, reader: Result) -> Result:
    """Return seconds: until all was read, since the reader and since the first worker began; and those of the workers."""
    if code:
        sys.exit(f"torchrun failed:\n{(folder / 'log').read_text(errors='replace')[-8000:]}")
    workers = [json.loads(path.read_text()) for path in folder.glob("worker-*.json")]
    began, ended = min(each["began"] for each in workers), (folder / "out").stat().st_mtime
    reading = {"reading": ended - reader.get("began", began), "late": ended - began}
    return {**reader, **reading, "writing": max(each["seconds"] for each in workers)}


def measure_part(report: Report, kind: str, megabytes: int, rounds: int) -> None:
    """Compare our part with `cat`."""
    size = megabytes * 10**6 // RANKS
    variants = {name: partial(in_folder, partial(by, kind=kind, size=size)) for name, by in READERS.items()}
    what = f"{kind}, {megabytes} MB"
    taken = in_turns(variants, rounds, lambda text: print(f"{what}, {text}", flush=True))
    cat, ours = ({key: [one[key] for one in taken[name]] for key in taken[name][0]} for name in READERS)
    report.add(f"{what}: {CAT}", cat["reading"])
    report.add(f"{what}: {OURS}", ours["reading"])
    report.add(f"{what}: our speed / cat's", ratios(cat["reading"], ours["reading"]), "", 0.8, at_least=True)
    report.add(f"{what}: {OURS}, since the first byte was written", ours["late"])
    report.add(f"{what}: CPU of cat", cat["cpu"])
    report.add(f"{what}: CPU of our part", ours["cpu"])
    report.add(f"{what}: the workers' time, {OURS} / with cat", ratios(ours["writing"], cat["writing"]), "", 1.0)


READERS: dict[str, Callable[..., Result]] = {CAT: by_cat, OURS: by_us}


# --- a whole flow -----------------------------------------------------------------------------------


def by_flow(folder: Path, kind: str, size: int, words: list[str]) -> Result:
    """Run the flow, and return seconds from the first line shown to the last, and what the task has used."""
    asked = {"kind": kind, "size": size, "ranks": RANKS}
    command = [sys.executable, FLOW, "--no-pylint", "run", *words]
    to_the_end([command], folder, flow_environment(folder, asked))
    task: dict[str, float] = json.loads((folder / "task.json").read_text())
    seconds = max(shown_at(folder / "log", LAST_LINE)) - min(shown_at(folder / "log", FIRST_LINE))
    return {"seconds": seconds, **task}


def shown_at(log: Path, words: str) -> list[float]:
    """Return when Metaflow has shown each rank's line with these words; it puts the time before each line."""
    with open(log, encoding="utf-8", errors="replace", newline="\n") as file:
        times = [line[:23] for line in file if words in line]
    assert len(times) == RANKS, f"{len(times)} of {RANKS} lines: {words}"
    return [datetime.strptime(time, "%Y-%m-%d %H:%M:%S.%f").timestamp() for time in times]


def measure_flow(report: Report, kind: str, megabytes: int, rounds: int) -> None:
    """Compare a step whose workers write with a plain one that writes as much."""
    run = partial(by_flow, kind=kind, size=megabytes * 10**6 // RANKS)
    variants = {name: partial(in_folder, partial(run, words=words)) for name, words in FLOWS.items()}
    what = f"flow, {kind}, {megabytes} MB"
    taken = in_turns(variants, rounds, lambda text: print(f"{what}, {text}", flush=True))
    plain, gang = ({key: [one[key] for one in taken[name]] for key in taken[name][0]} for name in FLOWS)
    report.add(f"{what}: {PLAIN}", plain["seconds"])
    report.add(f"{what}: {GANG}", gang["seconds"])
    report.add(f"{what}: {GANG} / {PLAIN}", ratios(gang["seconds"], plain["seconds"]), "", 1.0)
    report.add(f"{what}: CPU of the task, {PLAIN}", plain["cpu"])
    report.add(f"{what}: CPU of the task, {GANG}", gang["cpu"])
    more = differences(gang["peak_mb"], plain["peak_mb"])
    report.add(f"{what}: more memory of the task", more, "MB", MORE_MEMORY_MB)


FLOWS = {PLAIN: [], GANG: ["--with", "torchrun"]}


def in_folder(run: Callable[[Path], Result]) -> Result:
    """Return what it returns, given a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder))


def main() -> None:
    """Measure both for each kind of output."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--megabytes", type=int, default=500, help="for our part alone")
    options.add_argument("--flow-megabytes", type=int, default=20, help="for a flow; 0: no flow")
    options.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    given = options.parse_args()
    report = Report("output")
    for kind in given.kinds:
        measure_part(report, kind, given.megabytes, given.rounds)
    for kind in given.kinds if given.flow_megabytes else ():
        measure_flow(report, kind, given.flow_megabytes, given.rounds)
    report.finish(given.json)


if __name__ == "__main__":
    main()
