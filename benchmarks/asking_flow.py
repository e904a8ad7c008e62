"""A flow whose one parallel step takes some seconds, or as long as a worker does. It runs with 0.2 of PyPI, too."""

import os

import metaflow
import pods
import sleeping_worker
from metaflow import FlowSpec, current, step

DECORATOR = os.environ["BENCHMARK_DECORATOR"]


class AskingFlow(FlowSpec):
    """Does nothing on all nodes at once."""

    @step
    def start(self):
        """Fan out."""
        self.next(self.train, num_parallel=int(os.environ["BENCHMARK_NODES"]))

    @getattr(metaflow, DECORATOR)
    @step
    def train(self):
        """Wait: in a worker, where there is `@torchrun`."""
        if DECORATOR == "torchrun":
            entrypoint = os.environ.get("BENCHMARK_ENTRYPOINT", sleeping_worker.__file__)
            current.torch.run(entrypoint=entrypoint, nproc_per_node=int(os.environ.get("BENCHMARK_NPROC", "1")))
        else:
            sleeping_worker.sleep()
        if current.parallel.node_index == 0:
            pods.finish_control_task(self)
        self.next(self.join)

    @step
    def join(self, inputs):
        """Fan in."""
        self.next(self.end)

    @step
    def end(self):
        """End."""


if __name__ == "__main__":
    AskingFlow()
