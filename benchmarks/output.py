"""What much output costs: our part alone beside `torchrun … | cat`, and a whole flow beside a step that prints as much.

Our part is the thread that reads the workers' pipes, and the one that writes labelled lines, here to a file, as `cat`
does. Its time begins with the first lines that it reads. Torchrun gives `cat` no labels to write.

In a flow, Metaflow's runtime reads the task's output line by line, stores it and shows it. That takes far longer, so
the flows write less. They count from the moment at which Metaflow shows the first line to that of the last. Lines are
printed one by one, and Metaflow has no task's Python buffer them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from output_worker import FIRST_LINE, KINDS, LAST_LINE, note
from pairs import columns, differences, in_folder, in_turns, ratios
from report import Report, parser
from starting import FLOW, HERE, environment, flow_environment, to_the_end

RANKS = 4
WORKER = str(HERE / "output_worker.py")
CAT, OURS = "cat behind torchrun", "our part"
PLAIN, GANG = "a plain step", "@torchrun"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
READ = "read"  # as first argument: be our part
# In a flow; the task's own threads and what they hold.
MORE_MEMORY_MB = 20.0
Result = Mapping[str, float]


# --- our part alone ---------------------------------------------------------------------------------


def by_cat(folder: Path, kind: str, size: int) -> Result:
    """Let `cat` read what torchrun's workers write to their common stdout."""
    where: dict[str, Any] = {"env": environment(folder), "cwd": folder}
    with open(folder / "out", "wb") as out, open(folder / "log", "wb") as log:
        command = [*TORCHRUN, WORKER, kind, str(size)]
        writing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, **where)
        assert writing.stdout is not None
        reading = subprocess.Popen(["cat"], stdin=writing.stdout, stdout=out)
        writing.stdout.close()
    _, _, used = os.wait4(reading.pid, 0)
    return result_of(folder, writing.wait(), {"cpu": used.ru_utime + used.ru_stime})


def by_us(folder: Path, kind: str, size: int) -> Result:
    """Let threads of ours read the pipes that our agent gives its workers, and write."""
    logs = folder / "logs"
    logs.mkdir()
    command = [*TORCHRUN[3:], f"--log-dir={folder}", WORKER, kind, str(size)]
    with open(folder / "out", "wb") as out, open(folder / "log", "wb") as log:
        reader = [sys.executable, __file__, READ, str(logs), *command]
        code = subprocess.run(reader, stdout=out, stderr=log, env=environment(folder), cwd=folder).returncode
    return result_of(folder, code, json.loads((folder / "reader.json").read_text()) if code == 0 else {})


def read(folder: str, *arguments: str) -> int:
    """Read the pipes as a task does until torchrun has ended; note when the first lines came."""
    import metaflow  # noqa: F401 - it imports our modules, so it must come before them

    from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import AGENT, HALT_SIGNAL
    from metaflow_extensions.torchrun.plugins.torchrun.supervisor.output import Output
    from metaflow_extensions.torchrun.plugins.torchrun.supervisor.pipes import LogReader, pipe_path

    began: list[float] = []

    async def read_all() -> int:
        output = Output(lambda *frame: None)

        def write(stream: str, lines: bytes) -> bool:
            if lines:
                began.append(time.time())
            return output.write(stream, lines)

        reader = LogReader(folder, {rank: (f"[rank {rank}] ", False) for rank in range(RANKS)}, "", write)
        news = os.open(pipe_path(folder, "agent", "workers"), os.O_RDWR)  # of a few lines, which nobody needs here
        torchrun = subprocess.Popen([sys.executable, AGENT, folder, str(HALT_SIGNAL), *arguments])
        reader.start()
        while (code := torchrun.poll()) is None:
            await asyncio.sleep(0.01)
        reader.finish()
        os.close(news)
        await output.settle()
        return code

    used = time.process_time()
    code = asyncio.run(read_all())
    note("reader", began=began[0], cpu=time.process_time() - used)
    return code


def result_of(folder: Path, code: int, reader: Result) -> Result:
    """Return seconds until all was read, since the reader began, else the first worker; and those of the workers."""
    if code:
        sys.exit(f"torchrun failed:\n{(folder / 'log').read_text(errors='replace')[-8000:]}")
    workers = [json.loads(path.read_text()) for path in folder.glob("worker-*.json")]
    began = reader.get("began", min(each["began"] for each in workers))
    reading = (folder / "out").stat().st_mtime - began
    return {**reader, "reading": reading, "writing": max(each["seconds"] for each in workers)}


def measure_part(report: Report, what: str, cat: dict[str, list[float]], ours: dict[str, list[float]]) -> None:
    """Compare our part with `cat`."""
    report.add(f"{what}: {CAT}", cat["reading"])
    report.add(f"{what}: {OURS}", ours["reading"])
    report.add(f"{what}: our speed / cat's", ratios(cat["reading"], ours["reading"]), "", 0.8, at_least=True)
    report.add(f"{what}: CPU of cat", cat["cpu"])
    report.add(f"{what}: CPU of our part", ours["cpu"])
    report.add(f"{what}: the workers' time, {OURS} / with cat", ratios(ours["writing"], cat["writing"]), "", 1.0)


# --- a whole flow -----------------------------------------------------------------------------------


def by_flow(folder: Path, kind: str, size: int, words: list[str]) -> Result:
    """Run the flow, and return seconds from the first line shown to the last, and what the task has used."""
    options = {"entrypoint": WORKER, "entrypoint_args": [kind, str(size), "prints"], "nproc_per_node": RANKS}
    asked = {"nodes": 1, "launches": [{"options": options, "after_s": 0}], "ranks_here": RANKS}
    command = [sys.executable, str(FLOW), "--no-pylint", "run", *words]
    to_the_end([command], folder, flow_environment(folder, asked))
    task: dict[str, float] = json.loads((folder / "task-0.json").read_text())
    seconds = max(shown_at(folder / "log", LAST_LINE)) - min(shown_at(folder / "log", FIRST_LINE))
    return {"seconds": seconds, **task}


def shown_at(log: Path, words: str) -> list[float]:
    """Return when Metaflow has shown each rank's line with these words; it puts the time before each line."""
    with open(log, encoding="utf-8", errors="replace", newline="\n") as file:
        times = [line[:23] for line in file if words in line]
    assert len(times) == RANKS, f"{len(times)} of {RANKS} lines: {words}"
    return [datetime.strptime(time, "%Y-%m-%d %H:%M:%S.%f").timestamp() for time in times]


def measure_flow(report: Report, what: str, plain: dict[str, list[float]], gang: dict[str, list[float]]) -> None:
    """Compare a step whose workers write with a plain one that writes as much."""
    report.add(f"{what}: {PLAIN}", plain["seconds"])
    report.add(f"{what}: {GANG}", gang["seconds"])
    report.add(f"{what}: {GANG} / {PLAIN}", ratios(gang["seconds"], plain["seconds"]), "", 1.0)
    more = differences(gang["peak_mb"], plain["peak_mb"])
    report.add(f"{what}: more memory of the task", more, "MB", MORE_MEMORY_MB)


FLOWS: dict[str, list[str]] = {PLAIN: [], GANG: ["--with", "torchrun"]}
BY_FLOW = {name: partial(by_flow, words=words) for name, words in FLOWS.items()}
WAYS: tuple[tuple[str, Callable[..., None], dict[str, Callable[..., Result]]], ...] = (
    ("", measure_part, {CAT: by_cat, OURS: by_us}),
    ("flow, ", measure_flow, BY_FLOW),
)


def main() -> None:
    """Measure both for each kind of output; no megabytes: not at all."""
    given = parser(__doc__, rounds=7, megabytes=500, flow_megabytes=20, kinds=list(KINDS)).parse_args()
    report = Report("output")
    for (name, measure, ways), megabytes in zip(WAYS, (given.megabytes, given.flow_megabytes), strict=True):
        for kind in given.kinds if megabytes else ():
            what, size = f"{name}{kind}, {megabytes} MB", megabytes * 10**6 // RANKS
            variants = {way: partial(in_folder, partial(by, kind=kind, size=size)) for way, by in ways.items()}
            taken = in_turns(variants, given.rounds, lambda text, what=what: print(f"{what}, {text}", flush=True))
            measure(report, what, *map(columns, taken.values()))
    report.finish(given.json)


if __name__ == "__main__":
    sys.exit(read(*sys.argv[2:])) if sys.argv[1:2] == [READ] else main()
