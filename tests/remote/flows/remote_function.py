"""A function of the flow file on every rank; its values are gathered, and what it raises is caught."""

import os
from dataclasses import dataclass

import plan
from backend import where
from metaflow import FlowSpec, current, step, torchrun


@dataclass
class Seen:
    rank: int
    node: int
    folder: str
    weights: bytes


def look(weights):
    rank = int(os.environ["RANK"])
    return Seen(rank, int(os.environ["GROUP_RANK"]), os.path.dirname(os.path.abspath(__file__)), weights * rank)


def fail(rank):
    if os.environ["RANK"] == str(rank):
        raise KeyError(f"rank {rank} misses a key")


class RemoteFunction(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @where
    @torchrun
    @step
    def train(self):
        self.folder = os.path.dirname(os.path.abspath(__file__))
        # Together more than the gang's channel would carry.
        self.result = current.torch.run(look, {"weights": b"w" * (1 << 20)}, gather=True, **plan.RUN)
        try:
            current.torch.run(fail, [self.result.world_size - 1], **plan.RUN)
        except KeyError as error:
            self.caught = [str(error), type(error.__cause__).__name__, *error.__notes__]
        self.next(self.join)

    @step
    def join(self, inputs):
        control = next(node for node in inputs if node.result.node_index == 0)
        seen = [control.result.rank(rank) for rank in range(control.result.world_size)]
        assert all(isinstance(one, Seen) for one in seen)
        assert {one.folder for one in seen} == {control.folder}, "another flow file than the task's"
        print("VALUES " + " ".join(f"{one.rank}/{one.node}/{len(one.weights) >> 20}" for one in seen))
        for node in inputs:
            print(f"CAUGHT on node {node.result.node_index}:", *node.caught)
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    RemoteFunction()
