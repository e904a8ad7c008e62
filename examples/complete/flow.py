"""Runs train.py on two nodes: it restarts after a failure, and the model is stored with the run."""

from pathlib import Path

from metaflow import FlowSpec, Parameter, card, current, step, torchrun


class CompleteFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")
    epochs = Parameter("epochs", type=int, default=5)
    checkpoints = Parameter("checkpoints", default="checkpoints", help="a folder; on a cluster of a shared volume")
    fail_after = Parameter("fail-after", type=int, default=-1, help="fail once after this epoch")

    @step
    def start(self):
        # Each run has its own. `resume` starts another run, which keeps this value.
        self.checkpoint = Path(self.checkpoints, current.run_id, "last.pt").resolve()
        self.next(self.train, num_parallel=self.nodes)

    @card(type="torchrun")
    @torchrun(max_restarts=2, hang_timeout_s=600)
    @step
    def train(self):
        args = {"epochs": self.epochs, "checkpoint": self.checkpoint, "fail-after": self.fail_after}
        self.result = current.torch.run("train.py", args, nproc_per_node=self.nproc, outputs=["model.pt"])
        self.next(self.join)

    @step
    def join(self, inputs):
        self.result = inputs[0].result  # of the node of rank 0
        self.next(self.end)

    @step
    def end(self):
        print(f"accuracy {self.result.metrics['accuracy']:.1%}, restarts {len(self.result.restarts)}")
        print(f"stored: {self.result.outputs}")


if __name__ == "__main__":
    CompleteFlow()
