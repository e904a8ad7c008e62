"""A flow whose one @parallel step launches what a benchmark asks for; without `@torchrun` it launches nothing."""

import json
import os
import time

from collective_worker import first_collective, note
from metaflow import FlowSpec, current, parallel, step

ASKED = json.loads(os.environ["BENCHMARK_ASKED"])


class LaunchingFlow(FlowSpec):
    """One launch after the other on all nodes at once."""

    @step
    def start(self):
        """Fan out."""
        self.next(self.train, num_parallel=ASKED["nodes"])

    @parallel
    @step
    def train(self):
        """Launch, each time after some seconds in which the step does something else."""
        for number, launch in enumerate(ASKED["launches"]):
            time.sleep(launch["after_s"])
            note(f"begin-{number}-{current.parallel.node_index}")
            if "torch" in current:
                self.launch(number, **launch["options"])
        self.next(self.join)

    def launch(self, number, entrypoint=None, **options):
        """Launch a script, or without one the function."""
        env = {"BENCHMARK_LAUNCH": str(number), **options.pop("env", {})}
        current.torch.run(entrypoint or first_collective, env=env, **options)

    @step
    def join(self, inputs):
        """Fan in."""
        self.next(self.end)

    @step
    def end(self):
        """End."""


if __name__ == "__main__":
    LaunchingFlow()
