"""Pipelining: each rank has some layers, and sends their output to the next rank."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICROBATCHES = 4


def layer(number: int, device: torch.device) -> nn.Module:
    """Return a layer, with the same weights on every rank."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(device)


def trained_whole(layers: int, inputs: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """Train a model of all layers here, for comparison; return the losses."""
    model = nn.Sequential(*(layer(number, inputs.device) for number in range(layers)))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).to(device)
    wanted = inputs.flip(1) / 4
    model = layer(rank, device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    schedule = ScheduleGPipe(PipelineStage(model, rank, ranks, device), MICROBATCHES, loss_fn=nn.functional.mse_loss)
    for _ in range(20):
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:  # the last rank computes the loss
            schedule.step(**({"target": wanted, "losses": parts} if rank == ranks - 1 else {}))
        optimizer.step()
        losses.append(sum(part.item() for part in parts) / MICROBATCHES)
    if rank == ranks - 1:
        expected = trained_whole(ranks, inputs, wanted)
        same = torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=1e-4)
        told = "as those of one model" if same else f"OTHERS than {expected[0]:.4f} -> {expected[-1]:.4f}"
        print(f"pipelining: {ranks} ranks with a layer each, {MICROBATCHES} small batches on the way at a time")
        print(f"pipelining: loss {losses[0]:.4f} -> {losses[-1]:.4f}, the losses are {told}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
