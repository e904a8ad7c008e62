"""FSDP2: each rank has a part of the weights. Another number of ranks can load what they saved."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy


def pick_device() -> torch.device:
    """Return one GPU per process where this node has enough of them, else the CPU."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


class Training:
    """The contents of a checkpoint; torch.distributed.checkpoint calls the last two methods."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step, self.saved_by, self.loss = 0, 0, 0.0

    def loss_at(self, step: int) -> torch.Tensor:
        """Return this rank's part of the loss. The data of a step does not depend on the number of ranks."""
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
        labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
        own = slice(dist.get_rank(), None, dist.get_world_size())
        return cross_entropy(self.model(inputs[own].to(self.device)), labels[own].to(self.device))

    def train_to(self, steps: int) -> None:
        while self.step < steps:
            self.optimizer.zero_grad()
            self.loss_at(self.step).backward()
            self.optimizer.step()
            self.step += 1

    @torch.no_grad()
    def evaluate(self) -> float:
        total = self.loss_at(-1)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        about = {"step": self.step, "saved_by": dist.get_world_size(), "loss": self.evaluate()}
        return {"model": model, "optimizer": optimizer, **about}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.step, self.saved_by, self.loss = state["step"], state["saved_by"], state["loss"]


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint that rank 0 finds: the file .metadata is written last."""
    found = [max((file.parent for file in folder.glob("step-*/.metadata")), default=None)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints; all nodes must see it")
    parser.add_argument("--steps", type=int, default=20, help="those of the last checkpoint included")
    args = parser.parse_args()
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    training, say = Training(device), print if dist.get_rank() == 0 else lambda *_: None
    ranks = dist.get_world_size()
    if (last := last_checkpoint(args.folder)) is not None:
        dcp.load({"training": training}, checkpoint_id=last)
        same = abs(training.evaluate() - training.loss) < 1e-4
        told = f"{training.saved_by} ranks have saved step {training.step}, {ranks} ranks go on"
        say(f"FSDP2: {told}; the loss is {'the same' if same else 'ANOTHER'}, {training.loss:.3f}")
    training.train_to(args.steps)
    say(f"FSDP2: {ranks} ranks, step {training.step}, loss {training.evaluate():.3f}")
    dcp.save({"training": training}, checkpoint_id=args.folder / f"step-{training.step:06}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
