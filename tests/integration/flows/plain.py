"""A flow with a plain @parallel step; `--with torchrun` does the rest."""

from metaflow import FlowSpec, current, parallel, step


class PlainFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @parallel
    @step
    def train(self):
        current.torch.run(entrypoint="worker.py")
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    PlainFlow()
