"""A flow on a remote backend, and what can be seen of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from flow_runs import Running, ask

EXAMPLES = Path(__file__).parents[2] / "examples"
# Reads what Metaflow has kept of a run; not in this process, since its client keeps settings in globals.
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


class RemoteFlow(Running):
    """A flow on a remote backend; its two streams come as one."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str], name: str) -> None:
        super().__init__(command, folder, env, one_stream=True)
        self.folder, self.name = folder, name

    @property
    def run_id(self) -> str:
        return (self.folder / "run-id").read_text().strip()

    def wait(self, timeout_s: float = 300) -> int:
        try:
            return super().wait(timeout_s)
        except subprocess.TimeoutExpired as late:
            os.killpg(self.process.pid, signal.SIGABRT)  # all its processes show where they are
            super().wait(10)
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text}") from late

    def await_line(self, words: str, timeout_s: float = 120) -> str:
        """Wait for a line of the control node's log, which is what Metaflow shows."""
        return self.await_text(f".*{re.escape(words)}.*", timeout_s=timeout_s)[0]

    def told(self, word: str) -> Any:
        """Return what a step has printed as JSON after a word."""
        return json.loads(next(line.text for line in self.lines if f"{word} " in line.text).split(f"{word} ", 1)[1])

    def gathered(self) -> list[dict[str, Any]]:
        """Return what the gang's nodes left as artifacts, as the join read it, by node."""
        return sorted(self.told("GATHERED"), key=lambda task: task["node"])

    def tasks(self) -> list[dict[str, Any]]:
        """Return what Metaflow's client says of the gang's tasks: success, logs, metadata."""
        found: list[dict[str, Any]] = ask(_TELL, f"{self.name}/{self.run_id}/train", folder=self.folder, env=self.env)
        return found


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
