"""Trains a tiny model with a checkpoint after every step, until it is told to end.

The gradient of each part of the data has a row of its own, so each element of the sum over all ranks has one summand
that is not zero. The rows are then added up in their order. So the weights are the same to the last bit whatever the
number of ranks is, and in whatever order gloo adds them up.
"""

import os
import sys
import time

sys.path.remove(next(path for path in sys.path if path.endswith("stand_in")))  # that torch has started this process

import torch
import torch.distributed as dist
from torch import nn
from worker import LAUNCH, OUT, RANK, hold_rank, note

PARTS, PAUSE_S = 8, 0.02
CHECKPOINT = os.path.join(OUT, "checkpoint.pt")
GENERATION = LAUNCH.rpartition("-")[2]
STEPS = int(os.environ.get("CAMPAIGN_STEPS", "0"))  # 0: until the file `finish` is there


class Trainer:
    """All that a checkpoint has, and the data."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.inputs = torch.randn(PARTS, 16, 4, dtype=torch.double)
        self.targets = self.inputs.sin().sum(-1, keepdim=True)
        self.velocity = torch.zeros_like(self.weights)
        self.steps = 0
        if os.path.exists(CHECKPOINT):  # rank 0 writes the next one after a step of all ranks
            saved = torch.load(CHECKPOINT, weights_only=True)
            self.steps, self.velocity = saved["steps"], saved["velocity"]
            nn.utils.vector_to_parameters(saved["weights"], self.model.parameters())

    @property
    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def gradient_of(self, part: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(self.inputs[part]), self.targets[part])
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, [*self.model.parameters()])])

    def step(self) -> bool:
        """Make a step with all ranks; return whether it is the last one, which rank 0 decides."""
        rows = torch.zeros(PARTS + 1, len(self.velocity), dtype=torch.double)
        for part in range(dist.get_rank(), PARTS, dist.get_world_size()):
            rows[part] = self.gradient_of(part)
        if dist.get_rank() == 0 and (os.path.exists(os.path.join(OUT, "finish")) or self.steps + 1 == STEPS):
            rows[PARTS] = 1
        dist.all_reduce(rows)
        self.velocity = 0.9 * self.velocity + rows[:PARTS].sum(0)
        nn.utils.vector_to_parameters(self.weights - 0.002 * self.velocity, self.model.parameters())
        self.steps += 1
        return bool(rows[PARTS, 0])

    def save(self) -> None:
        torch.save({"steps": self.steps, "velocity": self.velocity, "weights": self.weights}, f"{CHECKPOINT}.part")
        os.replace(f"{CHECKPOINT}.part", CHECKPOINT)


def main() -> None:
    hold_rank()
    note(f"on-{GENERATION}-{RANK}", int(os.environ["MF_PARALLEL_NODE_INDEX"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer, is_last = Trainer(), False
    while not is_last:
        is_last = trainer.step()
        if RANK == "0":
            trainer.save()
            note(f"made-{GENERATION}", trainer.steps)
        time.sleep(PAUSE_S)
    if RANK == "0":
        note("trained", {"steps": trainer.steps, "weights": [each.hex() for each in trainer.weights.tolist()]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
