"""Two nodes with two ranks each that compute until a file says that it is enough; a second launch is not asked."""

import json
import os

from around import Around
from metaflow import current, step, torchrun

OUT = os.environ["GANG_OUT"]


class AskedFlow(Around):
    @step
    def start(self):
        with open(f"{OUT}/run", "w") as file:
            json.dump(current.run_id, file)
        self.next(self.train, num_parallel=2)

    @torchrun
    @step
    def train(self):
        for number in range(2):
            current.torch.run("asked_worker.py", {"number": number}, nproc_per_node=2)
        self.next(self.join)


if __name__ == "__main__":
    AskedFlow()
