"""A flow with a plain @parallel step that waits, itself or in workers; see `cost_of_supervision.py`."""

import os
from pathlib import Path

from metaflow import FlowSpec, current, parallel, step
from waiting_worker import wait


class WaitingFlow(FlowSpec):
    """Waits on all nodes at once."""

    @step
    def start(self):
        """Fan out."""
        self.next(self.train, num_parallel=int(os.environ["BENCHMARK_NODES"]))

    @parallel
    @step
    def train(self):
        """Wait: in workers, where there is `@torchrun`."""
        Path(os.environ["BENCHMARK_FOLDER"], f"task-{current.parallel.node_index}").write_text(str(os.getpid()))
        if "torch" in current:
            current.torch.run(entrypoint=str(Path(__file__).with_name("waiting_worker.py")))
        else:
            wait(f"worker-{current.parallel.node_index}")
        self.next(self.join)

    @step
    def join(self, inputs):
        """Fan in."""
        self.next(self.end)

    @step
    def end(self):
        """End."""


if __name__ == "__main__":
    WaitingFlow()
