"""Distributed training on handwritten digits, with a snapshot after every epoch."""

import argparse
import gc
import gzip
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT_NAME = "snapshot.pt"


def pick_device() -> torch.device:
    """Return one GPU per process where this node has enough of them, else the CPU."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def load_data(path: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out images, split alike on every rank by a fixed seed."""
    with gzip.open(path, "rt") as file:  # a line has 8 x 8 pixels from 0 to 16, and the digit
        rows = torch.tensor([[int(value) for value in line.split(",")] for line in file])
    images = rows[:, :64].reshape(-1, 1, 8, 8).float() / 16.0
    labels = rows[:, 64]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, training = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[held_out], labels[held_out])


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def save_snapshot(folder: Path, snapshot: dict[str, Any]) -> None:
    """Write another file and rename it: a process that is killed in between leaves the former snapshot whole."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{SNAPSHOT_NAME}.tmp"
    with unfinished.open("wb") as file:
        torch.save(snapshot, file)
        # Without fsync, the rename can reach the disk before the data; after a power cut the snapshot would be empty.
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / SNAPSHOT_NAME)


def load_snapshot(folder: Path | None) -> dict[str, Any] | None:
    """Return the snapshot that rank 0 reads and sends to all; only its node needs the folder."""
    found: list[dict[str, Any] | None] = [None]
    if dist.get_rank() == 0 and folder and (folder / SNAPSHOT_NAME).exists():
        found[0] = torch.load(folder / SNAPSHOT_NAME, map_location="cpu", weights_only=True)
    dist.broadcast_object_list(found, src=0)
    return found[0]


def fail_once() -> None:
    """Let the last rank fail once, to show a restart."""
    dist.barrier()  # rank 0 has saved its snapshot
    if dist.get_rank() == dist.get_world_size() - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("told to fail here")


class Trainer:
    """Model, optimizer and history of epochs, which a snapshot contains."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        self.snapshot_dir: Path | None = args.snapshot_dir
        self.fail_after: int | None = args.fail_after
        self.history: list[dict[str, float]] = []
        self.training, self.held_out = load_data(args.data)
        self.sampler = DistributedSampler(self.training, shuffle=True, seed=0)
        self.loader = DataLoader(self.training, batch_size=args.batch_size, sampler=self.sampler)
        self.model = build_model().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self._resume()
        self.first_epoch = len(self.history)
        self.ddp = DistributedDataParallel(self.model, device_ids=[device.index] if device.type == "cuda" else None)

    def _resume(self) -> None:
        snapshot = load_snapshot(self.snapshot_dir)
        if snapshot is None:
            return
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.history = snapshot["history"]
        if dist.get_rank() == 0:
            print(f"resumed from {self.snapshot_dir}: {len(self.history)} epochs are done already")

    def train(self, epochs: int) -> None:
        for epoch in range(self.first_epoch, epochs):
            loss = self._train_epoch(epoch)
            accuracy = self.accuracy()
            self.history.append({"epoch": epoch, "loss": loss, "accuracy": accuracy})
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: training loss {loss:.4f}, held-out accuracy {accuracy:.1%}")
                if self.snapshot_dir:
                    save_snapshot(self.snapshot_dir, self.state())
            if epoch + 1 == self.fail_after:
                fail_once()

    def _train_epoch(self, epoch: int) -> float:
        # The order depends only on the epoch, so a resumed run has the same order as a run without a break.
        self.sampler.set_epoch(epoch)
        total = torch.zeros((), device=self.device)
        for images, labels in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.ddp(images.to(self.device)), labels.to(self.device))
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / (len(self.loader) * dist.get_world_size())

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the accuracy. Each rank tests its own part; a sampler would repeat images to make the parts equal."""
        images, labels = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in self.held_out.tensors)
        # The model without DDP: the parts differ in size, and DDP expects the same calls on all ranks.
        right = (self.model(images.to(self.device)).argmax(dim=1) == labels.to(self.device)).sum()
        dist.all_reduce(right)
        return right.item() / len(self.held_out)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
        }


def same_on_all_ranks(model: nn.Module) -> bool:
    """Return whether all ranks ended with the same weights, bit for bit."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    lowest, highest = weights.clone(), weights.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)


def report(trainer: Trainer) -> dict[str, Any]:
    return {
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "first_epoch": trainer.first_epoch,
        "history": trainer.history,
        "accuracy": trainer.accuracy(),
        "same_on_all_ranks": same_on_all_ranks(trainer.model),
        "training_images": len(trainer.training),
        "held_out_images": len(trainer.held_out),
    }


def run(args: argparse.Namespace, device: torch.device) -> None:
    trainer = Trainer(args, device)
    trainer.train(args.epochs)
    metrics = report(trainer)
    if dist.get_rank() == 0:
        print(f"held-out accuracy {metrics['accuracy']:.1%} after {len(trainer.history)} epochs")
        if args.output_dir:
            args.output_dir.mkdir(parents=True, exist_ok=True)
            (args.output_dir / "metrics.json").write_text(json.dumps(metrics))
            torch.save(trainer.model.state_dict(), args.output_dir / "model.pt")


def leave_group() -> None:
    # DDP's reference cycles keep the group's gloo threads alive. A thread that still runs while Python exits aborts the
    # process ("terminate called without an active exception"). Garbage collection ends the threads here.
    gc.collect()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "digits.csv.gz")
    parser.add_argument("--epochs", type=int, default=5, help="epochs in all, including those of a snapshot")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--snapshot-dir", type=Path, help="save a snapshot here, and resume from it if there is one")
    parser.add_argument("--fail-after", type=int, help="let the last rank fail once after so many epochs")
    parser.add_argument("--output-dir", type=Path, help="rank 0 writes metrics.json and model.pt here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run(args, device)
    leave_group()


if __name__ == "__main__":
    main()
