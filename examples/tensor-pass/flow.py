"""A tensor goes once around the processes of several Metaflow tasks."""

import json
import tempfile
from pathlib import Path

from metaflow import FlowSpec, Parameter, current, step, torchrun


class TensorPassFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        self.ring = None
        with tempfile.TemporaryDirectory() as output_dir:
            self.result = current.torch.run(
                entrypoint="train.py",
                entrypoint_args={"output-dir": output_dir},
                nproc_per_node=self.nproc,
            )
            # Rank 0 is on node 0, and only that node has the file that it wrote.
            if current.parallel.node_index == 0:
                self.ring = json.loads((Path(output_dir) / "ring.json").read_text())
        self.next(self.join)

    @step
    def join(self, inputs):
        self.ring = next(node.ring for node in inputs if node.ring)
        self.next(self.end)

    @step
    def end(self):
        world_size = self.nodes * self.nproc
        if len(self.ring["received"]) != world_size or self.ring["received"] != self.ring["expected"]:
            raise RuntimeError(f"the ring of {world_size} ranks is broken: {self.ring}")
        print(f"rank 0 got {self.ring['received']} back")
        print(f"tensor passed around {world_size} ranks on {self.nodes} nodes over {self.ring['backend']}: ok")


if __name__ == "__main__":
    TensorPassFlow()
