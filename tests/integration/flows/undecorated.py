"""A flow without @torchrun that uses current.torch."""

from metaflow import FlowSpec, current, step


class UndecoratedFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @step
    def train(self):
        gang = current.torch
        gang.run("worker.py")
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    UndecoratedFlow()
