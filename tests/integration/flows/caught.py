"""A gang whose failure is caught by Metaflow."""

from metaflow import FlowSpec, catch, current, step, torchrun
from notes import note


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
        note("end", {"exception": self.failure.exception})


if __name__ == "__main__":
    CaughtFlow()
