"""How benchmarks start workers: by a flow with or without `@torchrun`, and by torchrun alone in a shell for each node."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
FLOW = HERE / "launching_flow.py"
COLD, WARM_AGENT, WARM_WORKERS = "cold", "warm agent", "warm workers"
HEATS = [COLD, WARM_AGENT, WARM_WORKERS]
_WARM = {COLD: "False", WARM_AGENT: "agent", WARM_WORKERS: "workers"}


class Shape(NamedTuple):
    """How many nodes, and how many processes on each."""

    nodes: int
    nproc: int

    def __str__(self) -> str:
        return f"{self.nodes} x {self.nproc}"


@dataclass(frozen=True)
class Launch:
    """One call of `run`, `after_s` seconds after the one before or the step's begin."""

    options: dict[str, Any]  # arguments of `run`; without an entrypoint the function of `collective_worker`
    after_s: float = 0.0


class Took(NamedTuple):
    """What commands took: the seconds until the last had ended, and the CPU of all that they have started."""

    seconds: float
    cpu_s: float


def by_flow(folder: Path, shape: Shape, launches: Sequence[Launch], heat: str | None) -> Took:
    """Run the flow to its end, without `@torchrun` if `heat` is None."""
    asked = {"nodes": shape.nodes, "launches": [vars(launch) for launch in launches]}
    # As an attribute, since spares are made ready for what is known before `run`.
    words = [] if heat is None else ["--with", f"torchrun:nproc_per_node={shape.nproc},warm={_WARM[heat]}"]
    took = to_the_end(
        [[sys.executable, str(FLOW), "--no-pylint", "run", *words]], folder, flow_environment(folder, asked)
    )
    for line in set(re.findall(r".*starts cold:.*", (folder / "log").read_text(errors="replace"))):
        print(line, flush=True)  # it was to be warm, but has started cold
    return took


def flow_environment(folder: Path, asked: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a flow that does what is asked; what it stores and notes is in the folder."""
    return {
        **environment(folder),
        "BENCHMARK_ASKED": json.dumps(asked),
        "METAFLOW_USER": "benchmark",
        "METAFLOW_DEFAULT_METADATA": "local",
        "METAFLOW_DEFAULT_DATASTORE": "local",
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def start(
    command: Sequence[str], folder: Path, env: Mapping[str, str], log: str = "log.txt"
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output in a file; an environment without Metaflow's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("METAFLOW_", "AWS_"))}
    where = {"cwd": folder, "env": {**kept, **env}, "stdin": subprocess.DEVNULL, "start_new_session": True}
    with open(folder / log, "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **where)  # type: ignore[call-overload]


def by_torchrun(folder: Path, shape: Shape, script: Path, *args: str) -> Took:
    """Run a script by a torchrun for each node, and note when they began.

    Whatever torchrun sets by default stays as it is.
    """
    port = free_port()
    commands = []
    for node in range(shape.nodes):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={shape.nodes}", f"--node-rank={node}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}", f"--nproc-per-node={shape.nproc}"]
        commands.append([*command, str(script), *args])
    (folder / "begin-0-0").write_text(repr(time.monotonic()), encoding="ascii")
    return to_the_end(commands, folder, environment(folder))


def environment(folder: Path) -> dict[str, str]:
    """Return what all variants have in their environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("METAFLOW_")}
    # Where bytecode must not be written, each process would compile all modules that were never imported before.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**kept, "BENCHMARK_FOLDER": str(folder)}


def to_the_end(commands: Sequence[Sequence[str]], folder: Path, env: dict[str, str]) -> Took:
    """Run commands side by side, or end the benchmark if one fails."""
    begun, cpu_before = time.monotonic(), cpu_of_children()
    with open(folder / "log", "wb") as log:
        running = [
            subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            for command in commands
        ]
        try:
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                process.terminate()
    took = Took(time.monotonic() - begun, cpu_of_children() - cpu_before)
    if any(codes):
        sys.exit(f"{commands[0]} failed:\n{(folder / 'log').read_text(errors='replace')[-8000:]}")
    return took


def cpu_of_children() -> float:
    """Return the CPU seconds of all children that have ended, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def last(folder: Path, pattern: str) -> float:
    """Return the latest of the times that were noted under such names."""
    times = [float(path.read_text()) for path in folder.glob(pattern) if path.suffix != ".part"]
    assert times, f"{pattern}: nobody has noted a time\n{(folder / 'log').read_text(errors='replace')[-8000:]}"
    return max(times)


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def count_gpus() -> int:
    """Return how many NVIDIA GPUs torch can use; this process does not import it."""
    program = "import torch; print(torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0)"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
