"""A function in workers that have imported Metaflow already: it is none of this file, whose import would do that."""

import json
import os
import sys
from pathlib import Path

from metaflow import FlowSpec, current, step, torchrun

sys.path.append(str(Path(__file__).resolve().parents[2]))
from spares import await_spares

HAS = "'metaflow' in __import__('sys').modules"
SAID = "(lambda current: (current.pathspec, current.retry_count, current.parallel, current.get('torch')))"


class SpareCurrentFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=1)

    @torchrun(nproc_per_node=2, warm="workers", preload=["metaflow"])
    @step
    def train(self):
        await_spares(3)
        seen = list(current.torch.run(eval, [f"({HAS}, {SAID}(__import__('metaflow').current))"]))
        here = [current.pathspec, current.retry_count, current.parallel, None]
        note = {"here": here, "there": [there for _, there in seen], "had metaflow": [had for had, _ in seen]}
        with open(os.path.join(os.environ["GANG_OUT"], "current"), "w") as file:
            json.dump(note, file)
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    SpareCurrentFlow()
