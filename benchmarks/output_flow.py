"""A flow whose one @parallel step writes much: by workers, or without `@torchrun` by itself."""

import json
import os
import time

from metaflow import FlowSpec, current, parallel, step
from output_worker import note, peak_mb, write

ASKED = json.loads(os.environ["BENCHMARK_ASKED"])


class OutputFlow(FlowSpec):
    """As many bytes either way."""

    @step
    def start(self):
        """Fan out."""
        self.next(self.train, num_parallel=1)

    @parallel
    @step
    def train(self):
        """Have all written, and note how much memory the task has used."""
        kind, size, ranks = ASKED["kind"], ASKED["size"], ASKED["ranks"]
        used = time.process_time()
        if "torch" in current:
            current.torch.run("output_worker.py", entrypoint_args=[kind, str(size), "prints"], nproc_per_node=ranks)
        else:
            for rank in range(ranks):
                write(kind, size, rank, prints=True)
        note("task", peak_mb=peak_mb(), cpu=time.process_time() - used)
        self.next(self.join)

    @step
    def join(self, inputs):
        """Fan in."""
        self.next(self.end)

    @step
    def end(self):
        """End."""


if __name__ == "__main__":
    OutputFlow()
