"""The features that torchrunx promises, as steps of a flow."""

import os
import time
from dataclasses import dataclass
from typing import Any

from metaflow import FlowSpec, TorchrunSingleNodeMultiGPU, current, step, torchrun


@dataclass
class Fit:
    rank: int
    node: int
    weights: dict[str, Any]
    error: float


def fit_line(slope: float, steps: int = 200) -> Fit:
    """Fit a line to points that only this rank has; the gradients are averaged over all ranks."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    inputs = torch.rand(64, 1)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), slope * inputs)
        loss.backward()
        optimizer.step()
    return Fit(rank, int(os.environ["GROUP_RANK"]), model.module.state_dict(), loss.item())


def predict(weights: dict[str, Any], x: float) -> float:
    import torch

    model = torch.nn.Linear(1, 1)
    model.load_state_dict(weights)
    return model(torch.tensor([x])).item()


def stumble(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"rank {rank} has no data")
    time.sleep(600)  # the others wait for it, as in a collective operation


class ParityFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @torchrun(nproc_per_node=2)
    @step
    def train(self):
        torch = current.torch
        # 1 and 2: a function with its arguments runs in every process on every machine.
        self.fits = torch.run(fit_line, {"slope": 3.0}, process_group="auto", gather=True)
        # 4: the same script continues with another number of processes. Those of the first launch have ended.
        self.prediction = torch.run(predict, [self.fits.local_rank(0).weights, 2.0], nproc_per_node=1)
        # 5: a failure of any rank is an exception here, on every machine.
        try:
            torch.run(stumble, {"rank": 3})
        except ValueError as error:
            self.caught = [str(error), *error.__notes__]
        self.next(self.join)

    @step
    def join(self, inputs):
        nodes = sorted(inputs, key=lambda node: node.fits.node_index)
        # 3: what each process returned, by rank, or by machine and local rank.
        fits = [nodes[0].fits.rank(rank) for rank in range(4)]
        same = all(node.fits.local_rank(i).rank == 2 * n + i for n, node in enumerate(nodes) for i in (0, 1))
        print("1. a function ran on", sorted(fit.rank for fit in fits), "with slope=3.0")
        print("2. two processes on each of two machines:", [fit.node for fit in fits])
        print("3. results by rank, and by machine and local rank:", "the same" if same else "not the same")
        print(f"4. then one process on each machine predicted {nodes[0].prediction.rank(0):.1f} for 2 (fitted: 3 x)")
        print("5. caught on both machines:", nodes[0].caught == nodes[1].caught, nodes[0].caught)
        self.next(self.alone)

    @step
    def alone(self):
        fit = (
            TorchrunSingleNodeMultiGPU()
            .run(entrypoint=fit_line, entrypoint_args={"slope": -1.0}, process_group="auto")
            .rank(0)
        )
        print(f"and with one process of one machine: the slope is {fit.weights['weight'].item():.1f}")
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    ParityFlow()
