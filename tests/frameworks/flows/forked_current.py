"""A function in forked workers, which have imported Metaflow already: it is none of this file, whose import would do that."""

import json
import os

from metaflow import FlowSpec, current, step, torchrun

HAS = "'metaflow' in __import__('sys').modules"
SAID = "(lambda current: (current.pathspec, current.retry_count, current.parallel, current.get('torch')))"


class ForkedCurrentFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=1)

    @torchrun(nproc_per_node=2, warm="workers", preload=["metaflow"])
    @step
    def train(self):
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
    ForkedCurrentFlow()
