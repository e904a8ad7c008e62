"""Train with a function. Its arguments are hyperparameters, its value is weights and metrics for the next step."""

import os
from dataclasses import dataclass
from typing import Any

from metaflow import FlowSpec, IncludeFile, Parameter, current, step, torchrun


@dataclass
class Hyperparameters:
    epochs: int
    lr: float
    batch_size: int


@dataclass
class Trained:
    weights: dict[str, Any]
    losses: list[float]
    world_size: int


def train(hyper: Hyperparameters, data: bytes) -> Trained | None:
    """Train on every rank; only rank 0 returns a value, since all ranks end with the same weights."""
    import digits  # it imports torch, which the flow's tasks do not need

    model, losses = digits.train(data, hyper.epochs, hyper.lr, hyper.batch_size)
    if os.environ["RANK"] != "0":
        return None
    return Trained(model.state_dict(), losses, int(os.environ["WORLD_SIZE"]))


class FunctionFlow(FlowSpec):
    # Metaflow stores the file with the run, so every node has it on any machine.
    data = IncludeFile("data", is_text=False, default="digits.csv.gz", help="the images")
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")
    epochs = Parameter("epochs", type=int, default=5)
    lr = Parameter("lr", type=float, default=0.1, help="learning rate")

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        hyper = Hyperparameters(self.epochs, self.lr, batch_size=16)
        self.result = current.torch.run(
            train, {"hyper": hyper, "data": self.data}, nproc_per_node=self.nproc, process_group="auto"
        )
        self.next(self.join)

    @step
    def join(self, inputs):
        control = next(node for node in inputs if node.result.node_index == 0)
        self.trained = control.result.rank(0)  # weights and metrics become an artifact
        self.merge_artifacts(inputs, exclude=["result"])
        self.next(self.evaluate)

    @step
    def evaluate(self):
        import digits

        self.accuracy, self.held_out = digits.accuracy(self.trained.weights, self.data)
        self.next(self.end)

    @step
    def end(self):
        for epoch, loss in enumerate(self.trained.losses):
            print(f"epoch {epoch}: training loss {loss:.4f}")
        print(
            f"{self.trained.world_size} ranks trained; accuracy on {self.held_out} held-out digits: {self.accuracy:.1%}"
        )


if __name__ == "__main__":
    FunctionFlow()
