"""Trains a classifier on all ranks, validates it, and goes on from its last checkpoint. Plain PyTorch, but for two lines."""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from metaflow_torchrun import report, stopping
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(size: int, seed: int) -> TensorDataset:
    """Return random points and which half of their coordinates is larger. Load your data here."""
    points = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, :4].norm(dim=1) > points[:, 4:].norm(dim=1)).long())


def pick_device() -> torch.device:
    """Return one GPU per process where this node has enough of them, else the CPU."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def save(path: Path, state: dict) -> None:
    """Write another file and rename it: nobody finds half a checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


def load(path: Path) -> dict | None:
    """Return the checkpoint that rank 0 finds and sends to all: other nodes may not have the file."""
    found = [None]
    if dist.get_rank() == 0 and path.exists():
        found[0] = torch.load(path, map_location="cpu", weights_only=True)
    dist.broadcast_object_list(found, src=0)
    return found[0]


@torch.no_grad()
def validate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the accuracy over all ranks, each of which tests its own part; equal on all."""
    points, labels = (tensor[dist.get_rank() :: dist.get_world_size()].to(device) for tensor in data.tensors)
    right = (model(points).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(data)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, held_out = make_data(4096, seed=0), make_data(1024, seed=1)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size // ranks, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if last := load(args.checkpoint):
        model.load_state_dict(last["model"])
        optimizer.load_state_dict(last["optimizer"])
        if rank == 0:
            print(f"goes on after epoch {last['epoch']}")
    begin = last["epoch"] + 1 if last else 0
    Path("model.pt").unlink(missing_ok=True)  # of an earlier run: after a failure it would be stored
    parallel = nn.parallel.DistributedDataParallel(model)
    for epoch in range(begin, args.epochs):
        if stopping():
            break  # before a spot loss, or by `torchrun stop`: the epochs before are saved
        sampler.set_epoch(epoch)
        for number, (points, labels) in enumerate(loader, epoch * len(loader)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(points.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            report(step=number, total=args.epochs * len(loader), loss=loss)
        accuracy = validate(model, held_out, device)
        report(step=number, accuracy=accuracy)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.1%}")
            save(args.checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch})
        dist.barrier()  # the checkpoint is there
        if epoch == args.fail_after and rank == ranks - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("told to fail here")
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--checkpoint", type=Path, default="last.pt")
    parser.add_argument("--fail-after", type=int, help="let the last rank fail once after this epoch")
    args = parser.parse_args()
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, device)
    gc.collect()  # else gloo's threads may outlive the process group, and abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
