"""Runs after.py on two nodes with two processes each; the model is stored with the run."""

from metaflow import FlowSpec, Parameter, current, step, torchrun


class OneModelFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")
    epochs = Parameter("epochs", type=int, default=5)

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        self.result = current.torch.run(
            "after.py",
            {"epochs": self.epochs},
            nproc_per_node=self.nproc,
            outputs=["model.pt"],
        )
        self.next(self.join)

    @step
    def join(self, inputs):
        self.model = inputs[0].result.outputs  # rank 0, on node 0, has saved it
        self.next(self.end)

    @step
    def end(self):
        print(f"stored: {self.model}")


if __name__ == "__main__":
    OneModelFlow()
