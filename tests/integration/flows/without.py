"""A flow without a step of ours."""

from metaflow import FlowSpec, step


class WithoutFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    WithoutFlow()
