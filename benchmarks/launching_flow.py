"""A flow whose one @parallel step launches what a benchmark asks for; without `@torchrun` nothing, or the same by itself."""

import json
import os
import resource
import runpy
import sys
import time

from collective_worker import first_collective, note
from metaflow import FlowSpec, current, parallel, step

ASKED = json.loads(os.environ["BENCHMARK_ASKED"])


def run_here(options, rank):
    """Do in this process what a worker would."""
    os.environ["RANK"] = str(rank)
    sys.argv = [options["entrypoint"], *options.get("entrypoint_args", ())]
    runpy.run_path(options["entrypoint"], run_name="__main__")


def tell(node, **facts):
    """Leave facts about this task for the benchmark."""
    path = os.path.join(os.environ["BENCHMARK_FOLDER"], f"task-{node}.json")
    with open(path, "w", encoding="ascii") as file:
        json.dump({"pid": os.getpid(), **facts}, file)


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
        node, used = current.parallel.node_index, time.process_time()
        tell(node)
        for number, launch in enumerate(ASKED["launches"]):
            time.sleep(launch["after_s"])
            note(f"begin-{number}-{node}")
            if "torch" in current:
                self.launch(number, **launch["options"])
            for rank in range(0 if "torch" in current else ASKED.get("ranks_here", 0)):
                run_here(launch["options"], node * ASKED["ranks_here"] + rank)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        tell(node, cpu=time.process_time() - used, peak_mb=peak_mb)
        self.next(self.join)

    def launch(self, number, entrypoint=None, **options):
        """Launch a script, or without one the function."""
        env = {"BENCHMARK_LAUNCH": str(number)}
        current.torch.run(entrypoint=entrypoint or first_collective, env=env, **options)

    @step
    def join(self, inputs):
        """Fan in."""
        self.next(self.end)

    @step
    def end(self):
        """End."""


if __name__ == "__main__":
    LaunchingFlow()
