"""A gang in every branch of a foreach."""

import plan
from backend import where
from metaflow import FlowSpec, current, step, torchrun


class RemoteForeach(FlowSpec):
    @step
    def start(self):
        self.names = ["a", "b"]
        self.next(self.branch, foreach="names")

    @step
    def branch(self):
        self.letter = self.input
        self.next(self.train, num_parallel=2)

    @where
    @torchrun
    @step
    def train(self):
        self.node = current.parallel.node_index
        self.world = current.torch.run(entrypoint="worker.py", entrypoint_args=[self.letter], **plan.RUN).world_size
        self.next(self.join)

    @step
    def join(self, inputs):
        self.seen = [f"{i.letter}{i.node}/{i.world}" for i in inputs]
        self.next(self.merge)

    @step
    def merge(self, inputs):
        print("SEEN " + " ".join(sorted(name for i in inputs for name in i.seen)))
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    RemoteForeach()
