"""A flow without a step of ours."""

from metaflow import FlowSpec, current, step


class WithoutFlow(FlowSpec):
    @step
    def start(self):
        self.nodes = current.torch.num_nodes if "torch" in current else None
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    WithoutFlow()
