"""The steps around a gang, which flows inherit: they add the step `train`, and another join where they have values."""

from metaflow import FlowSpec, step


class Around(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass
