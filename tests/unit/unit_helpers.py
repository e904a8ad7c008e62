"""What several unit tests need."""

import os
from concurrent.futures import wait
from pathlib import Path

import psutil
from limits import eventually as eventually
from limits import limit_s

from metaflow_extensions.torchrun.plugins import torchrun as package
from metaflow_extensions.torchrun.plugins.torchrun.machine.aside import Aside
from metaflow_extensions.torchrun.plugins.torchrun.settings import RunSettings, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import WORKER_HOOKS
from metaflow_extensions.torchrun.plugins.torchrun.task.arguments import Position, resolve

# Whoever waits for longer waits for what never comes.
HANG_S = 60.0
PACKAGE = "metaflow_extensions.torchrun.plugins.torchrun"
# For programs that need none of Metaflow, whose import takes a second: our package as `ours`, without its `__init__`.
OURS = f"""
import sys, types
ours = sys.modules["ours"] = types.ModuleType("ours")
ours.__path__ = [{os.path.dirname(package.__file__)!r}]
"""

# Names and texts that a shell, a template or a careless join would damage.
HOSTILE = [
    "plain",
    "two words",
    "it's",
    'say "hi"',
    "back\\slash\\",
    "line\nbreak",
    "tab\there",
    "größe 模型 🙂",
    "--leading",
    "-x",
    "$HOME",
    "$$",
    "${local_rank}",
    "$local_rank",
    "$",
    "100%$",
    "`id`",
    "*",
    "a;b&c|d",
    "#comment",
    "~",
    " ",
    "",
]


class Patient(Aside):
    """It waits for each job, however busy this machine is: for tests whose disks answer."""

    def begin(self, work, *args):
        job = super().begin(work, *args)
        wait([job], limit_s(HANG_S))
        return job


def is_running(pid: int) -> bool:
    """Tell whether a process lives; the dead that nobody has reaped do not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def worker_environment(inherited, folder):
    """Return the environment in which this process starts a worker that leaves its files in `folder`."""
    path = os.pathsep.join(filter(None, [WORKER_HOOKS, inherited.get("PYTHONPATH")]))
    own = {"TORCHRUN_AGENT_PID": str(os.getpid()), "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    return {**inherited, **own, "PYTHONPATH": path}


def write(path: Path, text: str) -> Path:
    """Write a file, folders included."""
    os.makedirs(path.parent, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


class MemoryStore:
    """A datastore that keeps all in memory, under the keys "0", "1" and so on; while `fails`, it takes nothing."""

    where, folder, fails = "the s3 datastore s3://bucket", None, False
    address = {"type": "s3", "root": "s3://bucket", "flow": "SomeFlow"}

    def __init__(self):
        self.data = {}

    def save(self, data):
        if self.fails:
            raise RuntimeError("SlowDown")
        key = str(len(self.data))
        self.data[key] = data
        return key

    def load(self, keys):
        for key in reversed(keys):
            yield key, self.data[key]


def settings_of_run(**arguments) -> RunSettings:
    """Return what a call of `run` with these arguments asks for in a step without attributes."""
    return resolve({"entrypoint": "x.py", **arguments}, parse_settings({}, "train"), Position(2, 0, "10.0.0.7"))
