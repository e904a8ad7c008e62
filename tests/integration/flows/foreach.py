"""A gang in every branch of a foreach."""

from metaflow import FlowSpec, current, step, torchrun
from notes import note


class ForeachFlow(FlowSpec):
    @step
    def start(self):
        self.names = ["a", "b"]
        self.next(self.branch, foreach="names")

    @step
    def branch(self):
        self.letter = self.input
        self.next(self.train, num_parallel=2)

    @torchrun
    @step
    def train(self):
        self.node = current.parallel.node_index
        current.torch.run(entrypoint="worker.py", entrypoint_args=[self.letter])
        self.next(self.join)

    @step
    def join(self, inputs):
        self.seen = sorted((i.letter, i.node) for i in inputs)
        self.next(self.merge)

    @step
    def merge(self, inputs):
        self.all = sorted(s for i in inputs for s in i.seen)
        self.next(self.end)

    @step
    def end(self):
        note("end", self.all)


if __name__ == "__main__":
    ForeachFlow()
