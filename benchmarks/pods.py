"""Runs a ``@parallel`` step as Metaflow's backends do: each node is a process that the backend starts, as in a pod.

On a local run the control task would start the others, and metaflow-torchrun 0.2.2 of PyPI does not run at all there
(with Metaflow 2.19). The commands are those that `argo-workflows create` and `kubernetes` make (Metaflow 2.19).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_ID, CONTROL, STEP = "benchmark", "2", "train"
_LIMIT_S = 600.0


def finish_control_task(flow: Any) -> None:
    """Name the tasks of the gang, as the decorators of backends do, in the control task."""
    flow._control_mapper_tasks = [f"{RUN_ID}/{STEP}/{CONTROL}"]  # nobody joins this gang


@dataclass(frozen=True)
class Backend:
    """Starts the processes of one flow, whose first step is ``start`` and whose second is ``train``."""

    python: Path
    flow: Path
    folder: Path  # for what the flow leaves on this machine
    env: Mapping[str, str]

    def run_until_gang(self) -> None:
        """Run what comes before the gang."""
        self._await(self._start("begin", "init", "--run-id", RUN_ID, "--task-id", "0"))
        self._await(self._start("start", *self._step("start", "1", f"{RUN_ID}/_parameters/0")))

    def start_node(self, node: int, num_nodes: int) -> subprocess.Popen[bytes]:
        """Start a node of the gang, without waiting; its log is ``log-NODE.txt``."""
        task = CONTROL if node == 0 else f"{CONTROL}_node_{node}"
        context = ("--split-index", str(node), "--ubf-context", "ubf_control" if node == 0 else "ubf_task")
        env = {
            "METAFLOW_RUNTIME_ENVIRONMENT": "benchmark",
            "MF_PARALLEL_MAIN_IP": "127.0.0.1",
            "MF_PARALLEL_NUM_NODES": str(num_nodes),
            "MF_PARALLEL_NODE_INDEX": str(node),
            "MF_PARALLEL_CONTROL_TASK_ID": CONTROL,
        }
        return self._start(f"log-{node}.txt", *self._step(STEP, task, f"{RUN_ID}/start/1"), *context, **env)

    def log(self, node: int) -> str:
        """Return what a node has written."""
        return (self.folder / f"log-{node}.txt").read_text(errors="replace")

    @staticmethod
    def _step(name: str, task: str, inputs: str) -> tuple[str, ...]:
        return "step", name, "--run-id", RUN_ID, "--task-id", task, "--input-paths", inputs

    def _start(self, log: str, *words: str, **env: str) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("METAFLOW_", "AWS_"))}
        own = {
            "METAFLOW_USER": "benchmark",
            "METAFLOW_DEFAULT_METADATA": "local",
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(self.folder),
        }
        with open(self.folder / log, "wb") as file:
            return subprocess.Popen(
                [str(self.python), str(self.flow), "--no-pylint", *words],
                cwd=self.folder,
                env={**kept, **own, **self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait(_LIMIT_S):
            texts = [path.read_text(errors="replace")[-4000:] for path in self.folder.iterdir() if path.is_file()]
            raise SystemExit("\n".join(["what comes before the gang has failed:", *texts]))
