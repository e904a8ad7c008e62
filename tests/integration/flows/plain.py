"""A flow with a plain @parallel step; `--with torchrun` does the rest."""

from around import Around
from metaflow import current, parallel, step


class PlainFlow(Around):
    @parallel
    @step
    def train(self):
        current.torch.run(entrypoint="worker.py")
        self.next(self.join)


if __name__ == "__main__":
    PlainFlow()
