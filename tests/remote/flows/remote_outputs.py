"""Functions, commands before the workers, and files that the workers leave: of launches that end well or fail."""

import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from backend import where
from metaflow import FlowSpec, LaunchFailed, current, step, torchrun

WRITE = "open('commands.txt', 'w').write('by a list\\n')"
FIRST = [
    [sys.executable, "-c", WRITE],
    'test -s commands.txt; echo "by a string on node $MF_PARALLEL_NODE_INDEX" >>commands.txt',
]


def run(kind, **more):
    """Run the worker, and keep what it leaves on all nodes."""
    kept = {"outputs": [f"{kind}/", f"{kind}-*.json"], "outputs_from": "all"}
    return current.torch.run("leaves_files.py", [kind], **kept, **more)


@dataclass
class Seen:
    rank: int
    folder: str
    weights: bytes


def look(weights):
    rank = int(os.environ["RANK"])
    return Seen(rank, os.path.dirname(os.path.abspath(__file__)), weights * (rank + 1))


def fail(rank):
    if os.environ["RANK"] == str(rank):
        raise KeyError(f"rank {rank} misses a key")


def contents(outputs):
    return {f"{file.node} {file.name}": outputs.open(file.name, file.node).read()[:3].decode() for file in outputs}


class RemoteOutputs(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @where
    @torchrun(nproc_per_node=1)
    @step
    def train(self):
        self.host = socket.gethostname()
        self.folder = os.path.dirname(os.path.abspath(__file__))
        self.values = current.torch.run(look, {"weights": b"w" * (1 << 20)}, gather=True)
        try:
            current.torch.run(fail, [1])
        except KeyError as error:
            self.caught = [str(error), type(error.__cause__).__name__, *error.__notes__]
        self.result = run("good", before_run=FIRST)
        try:
            run("failing")
        except LaunchFailed as error:
            self.of_failed = error.outputs
        self.next(self.join)

    @where
    @step
    def join(self, inputs):
        control, member = inputs
        values = [control.values.rank(rank) for rank in (0, 1)]
        assert all(isinstance(one, Seen) for one in values)
        assert {one.folder for one in values} == {control.folder}, "another flow file than the task's"
        self.outputs = control.result.outputs
        folder = self.outputs.download("there")
        self.seen = {
            "values": [[one.rank, len(one.weights) >> 20] for one in values],
            "caught": [task.caught for task in (control, member)],
            "shards": [
                (folder / "good" / "shards" / f"{rank}.bin").read_bytes() == b"%d" % rank * 3_000_000 for rank in (0, 1)
            ],
            "by commands": [json.loads(Path(folder, f"good-{rank}.json").read_text())["commands"] for rank in (0, 1)],
            "kept": [contents(task.result.outputs) for task in (control, member)],
            "kept of failed": [contents(task.of_failed) for task in (control, member)],
            "hosts": [socket.gethostname(), control.host, member.host],
        }
        self.next(self.end)

    @step
    def end(self):
        print("SEEN " + json.dumps(self.seen))


if __name__ == "__main__":
    RemoteOutputs()
