"""From the death of one worker until the last process of its gang is gone: with `@torchrun`, and with torchrun alone.

Each time a new gang of 2 nodes with 2 workers each is started on this machine. At a random moment after the
first collective a worker gets SIGKILL. There are workers that compute by themselves at that moment, and workers that do
one collective after the other, of which gloo tells when another one's process is gone (NCCL does not).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from report import Report, parser
from starting import HERE, free_port, start

sys.path.insert(0, str(HERE.parent / "tests"))
from gangs import MARK, Gang, marked

WORKER = HERE / "failing_worker.py"
NODES, NPROC = 2, 2
KINDS = {"computes": "a worker that computes", "talks": "a worker in collectives"}
START_S, LOOK_S = 300.0, 0.01
MEDIAN_S, WORST_S = 0.5, 2.0
Start = Callable[[Path, Mapping[str, str]], Iterable["subprocess.Popen[bytes]"]]


# --- the ways to start a gang, each with a mark in the environment of all its processes -----------------------


def by_us(folder: Path, env: Mapping[str, str]) -> Iterable[subprocess.Popen[bytes]]:
    """Start two nodes as tasks do, with the default settings."""
    gang = Gang(folder / "gang", mark=env[MARK])
    own = {name: value for name, value in env.items() if name != MARK}
    gang.start(NODES, NPROC, settings={"grace_s": 30}, agent_env=own, entrypoint=str(WORKER))
    return gang.processes.values()


def by_torchrun(folder: Path, env: Mapping[str, str], rendezvous: str) -> Iterable[subprocess.Popen[bytes]]:
    """Start torchrun once for each node."""
    port = free_port()
    where = {
        "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark"],
    }
    common = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={NPROC}"]
    for node in range(NODES):
        yield start([*common, *where[rendezvous], f"--node-rank={node}", str(WORKER)], folder, env)


# --- one failure ----------------------------------------------------------------------------------------------


class Took(NamedTuple):
    """Seconds from the death of a worker."""

    workers: float  # until the last worker was gone
    everything: float  # until nothing was left


def fail(begin: Start, kind: str, limit_s: float) -> Took:
    """Start a gang, kill a worker, and return how long it took until the others were gone, `limit_s` at most."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {"BENCHMARK_FOLDER": name, "BENCHMARK_KIND": kind, "OMP_NUM_THREADS": "1", MARK: mark}
        processes = list(begin(folder, env))
        try:
            pids = _await_workers(folder, processes)
            time.sleep(random.random())
            living = _living(mark, processes)
            os.kill(random.choice(pids), signal.SIGKILL)
            struck = time.monotonic()
            workers_s = seconds = 0.0
            # To look for all that bear the mark takes much of a core; so only those that were there are looked at, and
            # those that came after them at their end.
            while seconds < limit_s and (living := {*filter(_lives, living)} or _living(mark, processes)):
                time.sleep(LOOK_S)
                seconds = time.monotonic() - struck
                workers_s = seconds if living.intersection(pids) else workers_s
            return Took(workers_s, seconds)
        finally:
            _kill(mark, processes)


def _await_workers(folder: Path, processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all have done their first collective, and return their pids."""
    paths = [folder / f"worker-{rank}" for rank in range(NODES * NPROC)]
    deadline = time.monotonic() + START_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline or all(process.poll() is not None for process in processes):
            logs = [path.read_text(errors="replace")[-4000:] for path in folder.rglob("log*.txt")]
            raise RuntimeError("\n".join(["the gang did not begin:", *logs]))
        time.sleep(0.05)
    return [int(path.read_text()) for path in paths]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _living(mark: str, processes: list[subprocess.Popen[bytes]]) -> set[int]:
    return marked(MARK, mark) | {process.pid for process in processes if process.poll() is None}


def _kill(mark: str, processes: list[subprocess.Popen[bytes]]) -> None:
    while living := _living(mark, processes):
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


# --- all ------------------------------------------------------------------------------------------------------


def measure(report: Report, name: str, begin: Start, kind: str, times: int, limit_s: float, is_ours: bool) -> None:
    """Let gangs of one launcher fail."""
    took = [fail(begin, kind, limit_s) for _ in range(times)]
    print(f"{name}: {', '.join(f'{each.everything:.2f}' for each in took)}", flush=True)
    everything = [each.everything for each in took]
    report.add(f"{name}: workers gone", [each.workers for each in took])
    report.add(f"{name}: everything gone", everything, target=MEDIAN_S if is_ours else None)
    if is_ours:
        report.add(f"{name}: everything gone, the worst", [max(everything)], target=WORST_S)
    elif max(everything) >= limit_s:
        report.note(f"{name}: what was left after {limit_s:g} s was ended by this program")


def main() -> None:
    """Let gangs fail, ours often and torchrun's a few times."""
    given = parser(__doc__, rounds=50, others=3, limit=60.0, kinds=list(KINDS)).parse_args()
    report = Report("failures")
    for kind in given.kinds:
        what = KINDS[kind]
        measure(report, f"{what}: @torchrun", by_us, kind, given.rounds, given.limit, is_ours=True)
        for how in ("static", "c10d") if given.others else ():
            begin = partial(by_torchrun, rendezvous=how)
            measure(report, f"{what}: torchrun, {how}", begin, kind, given.others, given.limit, is_ours=False)
    report.finish(given.json)


if __name__ == "__main__":
    main()
