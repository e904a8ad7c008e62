"""The model, its training on all ranks and its evaluation; nothing here uses Metaflow."""

import gzip

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def load(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels; a line has 8 x 8 pixels from 0 to 16, and the digit."""
    lines = gzip.decompress(data).decode().splitlines()
    rows = torch.tensor([[int(value) for value in line.split(",")] for line in lines])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows[:, :64].float() / 16.0, rows[:, 64]


def split(data: bytes, held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load(data)
    fifth = len(labels) // 5
    return (images[:fifth], labels[:fifth]) if held_out else (images[fifth:], labels[fifth:])


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(data: bytes, epochs: int, lr: float, batch_size: int) -> tuple[nn.Module, list[float]]:
    """Train on this rank's part of the images; the process group already exists."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    images, labels = (tensor.to(device) for tensor in split(data, held_out=False))
    model = build_model().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    steps, history = len(labels) // (batch_size * world), []
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch)).to(device)
        total = torch.zeros((), device=device)
        for batch in order[: steps * batch_size * world].view(steps, world, batch_size)[:, rank]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        history.append(total.item() / (steps * world))
    return model, history


@torch.no_grad()
def accuracy(weights: dict[str, torch.Tensor], data: bytes) -> tuple[float, int]:
    """Return the accuracy on the held-out digits, and their number."""
    model = build_model()
    model.load_state_dict(weights)
    images, labels = split(data, held_out=True)
    return (model(images).argmax(dim=1) == labels).float().mean().item(), len(labels)
