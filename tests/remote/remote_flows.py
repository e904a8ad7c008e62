"""A flow on a remote backend, and what can be seen of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flow_runs import Line

EXAMPLES = Path(__file__).parents[2] / "examples"
# Reads what Metaflow has kept of a run, in a process of its own: its client keeps settings in globals.
_TELL = """
import json, sys
from metaflow import Step, namespace
namespace(None)
tasks = []
for task in Step(sys.argv[1]):
    facts = {m.name: m.value for m in task.metadata}
    tasks.append({"id": task.id, "successful": task.successful, "out": task.stdout, "err": task.stderr, "facts": facts})
print("TOLD " + json.dumps(tasks))
"""


@dataclass
class RemoteFlow:
    """A flow that runs, or has run, on a remote backend."""

    process: subprocess.Popen[str]
    folder: Path
    env: dict[str, str]
    flow_name: str
    lines: list[Line] = field(default_factory=list)
    thread: threading.Thread | None = None

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    @property
    def run_id(self) -> str:
        return (self.folder / "run-id").read_text().strip()

    def wait(self, timeout_s: float = 300) -> int:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as late:
            os.killpg(self.process.pid, signal.SIGABRT)  # all its processes show where they are
            self.process.wait(10)
            time.sleep(1)
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text}") from late
        if self.thread is not None:
            self.thread.join(10)
        return code

    def await_line(self, words: str, timeout_s: float = 120) -> Line:
        """Wait for a line of the control node's log, which is what Metaflow shows."""
        deadline = time.monotonic() + timeout_s
        while True:
            for line in list(self.lines):
                if words in line.text:
                    return line
            assert self.process.poll() is None, f"ended without {words!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {words!r} in {timeout_s} s:\n{self.text}"
            time.sleep(0.1)

    def gathered(self) -> list[dict[str, Any]]:
        """Return what the gang's nodes left as artifacts, as the join read it, by node."""
        line = next(line.text for line in self.lines if "GATHERED " in line.text)
        found: list[dict[str, Any]] = json.loads(line.split("GATHERED ", 1)[1])
        return sorted(found, key=lambda task: task["node"])

    def tasks(self, step: str = "train") -> list[dict[str, Any]]:
        """Return what Metaflow's client says of a step's tasks: success, logs, metadata."""
        told = subprocess.run(
            [sys.executable, "-c", _TELL, f"{self.flow_name}/{self.run_id}/{step}"],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        for line in told.stdout.splitlines():
            if line.startswith("TOLD "):
                found: list[dict[str, Any]] = json.loads(line[5:])
                return found
        raise AssertionError(told.stdout + told.stderr)


def check_said(flow: RemoteFlow, *words: str) -> None:
    """Check that the control node's log, as the terminal shows it, holds these words; show it all if not."""
    missing = [text for text in words if text not in flow.text]
    assert not missing, f"not said: {missing}\n{flow.text}"


def check_gang(flow: RemoteFlow, nodes: int, nproc: int = 2) -> None:
    """Check the artifacts of a gang that ran to its end."""
    tasks = flow.gathered()
    assert [task["node"] for task in tasks] == list(range(nodes))
    for task in tasks:
        (result,) = task["results"]
        first = task["node"] * nproc
        assert result["world_size"] == nodes * nproc
        assert result["exit_codes"] == {str(rank): 0 for rank in range(first, first + nproc)}
