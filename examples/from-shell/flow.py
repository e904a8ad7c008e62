"""A script that was started by hand on every machine, run by torchrun or mpirun on all nodes."""

import json
import tempfile
from pathlib import Path

from metaflow import FlowSpec, Parameter, current, step, torchrun


class FromShellFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="machines; here, tasks of the train step")
    nproc = Parameter("nproc", type=int, default=2, help="processes on each of them")
    backend = Parameter("backend", default="gloo", help="gloo for CPUs, nccl for GPUs, or mpi")
    python = Parameter("python", default="", help="with mpi: the Python whose PyTorch has MPI, if this one's has not")

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        self.found = None
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "found.json"
            words = ["--backend", self.backend, "--ranks", self.nodes * self.nproc, "--output", output]
            if self.backend == "mpi":
                # mpirun starts the ranks. Each node runs one process that helps it.
                entrypoint = [self.python, "mpirun.py"] if self.python else "mpirun.py"
                current.torch.run(entrypoint, [self.nproc, "train.py", *words], nproc_per_node=1)
            else:
                current.torch.run("train.py", words, nproc_per_node=self.nproc)
            if output.exists():  # on the node of rank 0
                self.found = json.loads(output.read_text())
        self.next(self.join)

    @step
    def join(self, inputs):
        self.found = next(node.found for node in inputs if node.found)
        self.next(self.end)

    @step
    def end(self):
        print("y = {slope:.2f} x + {offset:.2f}, loss {loss:.4f}".format(**self.found))
        if not self.found["same"]:
            raise RuntimeError("the ranks have different weights")
        print(f"{self.found['ranks']} ranks over {self.backend} have the same weights: ok")


if __name__ == "__main__":
    FromShellFlow()
