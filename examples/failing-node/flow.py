"""One rank fails on purpose: all nodes stop, and each reports the cause."""

import json
import tempfile
from pathlib import Path

from metaflow import FlowSpec, Parameter, current, step, torchrun

WAYS = ["exception", "exit", "kill", "none"]


class FailingNodeFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")
    fail_rank = Parameter("fail-rank", type=int, default=3, help="the global rank that fails")
    how = Parameter("how", default="exception", help=f"how it fails, one of: {', '.join(WAYS)}")

    @step
    def start(self):
        if self.how not in WAYS:
            raise ValueError(f"--how is {self.how!r}, but must be one of: {', '.join(WAYS)}")
        if not 0 <= self.fail_rank < self.nodes * self.nproc:
            raise ValueError(f"--fail-rank is {self.fail_rank}, but ranks go from 0 to {self.nodes * self.nproc - 1}")
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        self.done = None
        with tempfile.TemporaryDirectory() as output_dir:
            self.result = current.torch.run(
                entrypoint="train.py",
                entrypoint_args={"how": self.how, "fail-rank": self.fail_rank, "output-dir": output_dir},
                nproc_per_node=self.nproc,
            )
            # Rank 0 is on node 0, and only that node has the file that it wrote.
            if current.parallel.node_index == 0:
                self.done = json.loads((Path(output_dir) / "done.json").read_text())
        self.next(self.join)

    @step
    def join(self, inputs):
        self.done = next(node.done for node in inputs if node.done)
        self.next(self.end)

    @step
    def end(self):
        print("{world_size} ranks did {steps_done} steps together and none failed: ok".format(**self.done))


if __name__ == "__main__":
    FailingNodeFlow()
