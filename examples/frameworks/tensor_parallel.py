"""Tensor parallel: each rank has some columns of one layer and the matching rows of the next."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    """The wide part of a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(inputs)))


def trained(model: nn.Module, inputs: torch.Tensor) -> list[float]:
    """Train the model to return its input; return the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs)
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
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).to(device)  # the same on all ranks
    torch.manual_seed(0)
    whole = Block().to(device)
    torch.manual_seed(0)
    split = parallelize_module(Block().to(device), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    own, of_all = split.up.weight.to_local().numel(), split.up.weight.numel()
    losses, expected = trained(split, inputs), trained(whole, inputs)
    same = torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=1e-4)
    if dist.get_rank() == 0:
        print(f"tensor parallel: {dist.get_world_size()} ranks with {own} of {of_all} weights of a layer each")
        told = "as those of one model" if same else f"OTHERS than {expected[0]:.4f} -> {expected[-1]:.4f}"
        print(f"tensor parallel: loss {losses[0]:.4f} -> {losses[-1]:.4f}, the losses are {told}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
