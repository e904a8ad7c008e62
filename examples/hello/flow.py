"""Two Metaflow tasks become the two nodes of one PyTorch job; every rank prints a line."""

import json
import tempfile
from pathlib import Path

from metaflow import FlowSpec, Parameter, current, step, torchrun


class HelloFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        with tempfile.TemporaryDirectory() as output_dir:
            self.result = current.torch.run(
                entrypoint="train.py",
                entrypoint_args={"output-dir": output_dir},
                nproc_per_node=self.nproc,
            )
            # Nodes may have separate disks, so each one stores what its own ranks wrote.
            self.ranks = [json.loads(path.read_text()) for path in Path(output_dir).glob("rank-*.json")]
        self.node_index = current.parallel.node_index
        self.next(self.join)

    @step
    def join(self, inputs):
        for node in inputs:
            misplaced = [fact["rank"] for fact in node.ranks if fact["node"] != node.node_index]
            if misplaced:
                raise RuntimeError(f"ranks {misplaced} ran on node {node.node_index} but believe otherwise")
        self.ranks = sorted((fact for node in inputs for fact in node.ranks), key=lambda fact: fact["rank"])
        self.next(self.end)

    @step
    def end(self):
        world_size = self.nodes * self.nproc
        if [fact["rank"] for fact in self.ranks] != list(range(world_size)):
            raise RuntimeError(f"expected ranks 0 to {world_size - 1}, got {self.ranks}")
        # Metaflow's log removes leading spaces, so the columns are aligned to the left.
        print("rank  local rank  node  device  host")
        for fact in self.ranks:
            print("{rank:<4}  {local_rank:<10}  {node:<4}  {device:<6}  {host}".format(**fact))
        sums = {fact["sum"] for fact in self.ranks}
        if sums != {world_size * (world_size + 1) // 2}:
            raise RuntimeError(f"the ranks disagree about the sum: {sums}")
        print(f"all-reduce over {world_size} ranks: ok (every rank got {sums.pop()})")


if __name__ == "__main__":
    HelloFlow()
