"""A @torchrun step that is entered without num_parallel."""

from metaflow import FlowSpec, step, torchrun


class NotParallelFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train)

    @torchrun
    @step
    def train(self):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    NotParallelFlow()
