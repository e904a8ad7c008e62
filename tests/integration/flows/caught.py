"""A gang whose failure is caught by Metaflow."""

from around import Around
from metaflow import catch, current, step, torchrun
from notes import note


class CaughtFlow(Around):
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
