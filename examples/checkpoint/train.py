"""Train a small network. Rank 0 saves model and optimizer, and every start continues from the last checkpoint."""

import argparse
import gc
import os
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints import open_store, save_part
from metaflow_torchrun import stopping
from resuming import last_checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FILE = "state.pt"
BATCH = 32  # examples in a step, over all ranks


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's examples of a step. They depend only on the step, so a restart sees the same ones."""
    inputs = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = inputs[rank * BATCH // size : (rank + 1) * BATCH // size]
    return mine, mine.sin().sum(dim=1, keepdim=True)


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.store, self.step = open_store(args.checkpoints, args.training), 0
        self.model = build_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.resume()
        # The argument keeps DDP from grouping the gradients again after its first step. Otherwise, with more than two ranks,
        # a training that continues would add them in another order, and the last bits of the weights would differ.
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)

    def resume(self) -> None:
        with last_checkpoint(self.store) as last:
            if last is None:
                return
            self.step, folder = last
            state = torch.load(folder / FILE, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if dist.get_rank() == 0:
            print(f"goes on after step {self.step}")

    def save(self) -> None:
        if dist.get_rank() == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            with tempfile.TemporaryDirectory() as folder:
                torch.save(state, Path(folder, FILE))
                save_part(self.store, Path(folder), self.step)
            print(f"saved step {self.step}")

    def train_step(self) -> float:
        inputs, targets = batch_of(self.step)
        loss = nn.functional.mse_loss(self.ddp(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


def die_at(step: int) -> None:
    """Kill the last rank by SIGKILL after this step, once, to show what happens."""
    if dist.get_rank() == dist.get_world_size() - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print(f"dies after step {step}")
        os.kill(os.getpid(), signal.SIGKILL)


def train(trainer: Trainer, args: argparse.Namespace) -> None:
    while trainer.step < args.steps:
        if stopping():  # on all ranks before the same step, when a node is told to end
            if trainer.step % args.every:  # else it is saved
                trainer.save()
            return
        loss = trainer.train_step()
        if trainer.step % args.every == 0 or trainer.step == args.steps:
            trainer.save()
        if dist.get_rank() == 0:
            print(f"step {trainer.step}: loss {loss:.6f}")
        time.sleep(args.pause)
        if trainer.step == args.die_at:
            die_at(trainer.step)
    weights = trainer.weights()
    if dist.get_rank() == 0 and args.output:
        torch.save(weights, args.output)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps in all, including those before a checkpoint")
    parser.add_argument("--every", type=int, default=4, help="steps between two checkpoints")
    parser.add_argument("--checkpoints", type=Path, default="checkpoints", help="where, if not in Metaflow's datastore")
    parser.add_argument("--training", default="", help="its name in Metaflow's datastore, the same after `resume`")
    parser.add_argument("--output", type=Path, help="rank 0 writes the model's weights here")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    parser.add_argument("--die-at", type=int, help="let the last rank die once after so many steps")
    return parser.parse_args()


def main(trainer: type[Trainer] = Trainer) -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    train(trainer(args), args)
    gc.collect()  # DistributedDataParallel has threads that must not outlive the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
