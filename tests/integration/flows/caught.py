"""A gang whose failure is caught by Metaflow."""

import json
import os

from metaflow import FlowSpec, catch, current, step, torchrun


class CaughtFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @catch(var="failure")
    @torchrun
    @step
    def train(self):
        current.torch.run(entrypoint="worker.py")
        self.next(self.join)

    @step
    def join(self, inputs):
        self.failure = inputs[0].failure
        self.next(self.end)

    @step
    def end(self):
        with open(os.path.join(os.environ["GANG_OUT"], "end"), "w") as file:
            json.dump({"exception": self.failure.exception}, file)


if __name__ == "__main__":
    CaughtFlow()
