"""Runs a ``@parallel`` step as Metaflow's backends do: each node is a process that the backend starts, as in a pod.

On a local run the control task would start the others, and metaflow-torchrun 0.2.2 of PyPI does not run at all there
(with Metaflow 2.19). The commands are those that `argo-workflows create` and `kubernetes` make (Metaflow 2.19).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starting import FLOW

_RUN, _CONTROL = "benchmark", "2"
_LIMIT_S = 600.0


def start(
    command: Sequence[str], folder: Path, env: Mapping[str, str], log: str = "log.txt"
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output in a file; an environment without Metaflow's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("METAFLOW_", "AWS_"))}
    where = {"cwd": folder, "env": {**kept, **env}, "stdin": subprocess.DEVNULL, "start_new_session": True}
    with open(folder / log, "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **where)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Backend:
    """Starts the processes of `launching_flow`, up to its second step."""

    python: Path
    folder: Path  # for what the flow leaves on this machine
    env: Mapping[str, str]
    asked: Mapping[str, Any]  # of the flow

    def run_until_gang(self) -> None:
        """Run what comes before the gang."""
        self._run("init", "--run-id", _RUN, "--task-id", "0")
        self._run(*self._step("start", "1", f"{_RUN}/_parameters/0"))

    def start_node(self, node: int) -> subprocess.Popen[bytes]:
        """Start a node of the gang, without waiting; its log is ``log-NODE.txt``."""
        task = _CONTROL if node == 0 else f"{_CONTROL}_node_{node}"
        context = ("--split-index", str(node), "--ubf-context", "ubf_control" if node == 0 else "ubf_task")
        env = {
            "METAFLOW_RUNTIME_ENVIRONMENT": "benchmark",
            "MF_PARALLEL_MAIN_IP": "127.0.0.1",
            "MF_PARALLEL_NUM_NODES": str(self.asked["nodes"]),
            "MF_PARALLEL_NODE_INDEX": str(node),
            "MF_PARALLEL_CONTROL_TASK_ID": _CONTROL,
        }
        return self._start(f"log-{node}.txt", *self._step("train", task, f"{_RUN}/start/1"), *context, **env)

    def log(self, name: str) -> str:
        """Return the end of a log."""
        return (self.folder / f"log-{name}.txt").read_text(errors="replace")[-8000:]

    @staticmethod
    def _step(name: str, task: str, inputs: str) -> tuple[str, ...]:
        return "step", name, "--run-id", _RUN, "--task-id", task, "--input-paths", inputs

    def _start(self, log: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
        own = {
            "METAFLOW_USER": "benchmark",
            "METAFLOW_DEFAULT_METADATA": "local",
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(self.folder),
            "BENCHMARK_FOLDER": str(self.folder),
            "BENCHMARK_ASKED": json.dumps(self.asked),
        }
        return start(
            [str(self.python), str(FLOW), "--no-pylint", *words], self.folder, {**own, **self.env, **more}, log
        )

    def _run(self, *words: str) -> None:
        if self._start("log-before.txt", *words).wait(_LIMIT_S):
            raise SystemExit(f"what comes before the gang has failed:\n{self.log('before')}")
