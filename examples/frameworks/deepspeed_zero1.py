"""DeepSpeed with ZeRO-1: each rank has all weights, and the optimizer state of a part of them."""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},  # its own Adam would be compiled first
    "zero_optimization": {"stage": 1},
}


def main() -> None:
    if not torch.cuda.is_available():
        # On a CPU, DeepSpeed would first compile its communication in shared memory: a minute, and a compiler.
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed()  # with gloo where there is no GPU
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    inputs = torch.randn(16 * ranks, 8, generator=torch.Generator().manual_seed(0))[rank::ranks].to(engine.device)
    wanted = inputs.sum(dim=1, keepdim=True)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(engine(inputs), wanted)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    own = sum(state["exp_avg"].numel() for state in optimizer.optimizer.state.values())
    weights = sum(parameter.numel() for parameter in model.parameters())
    if rank == 0:
        print(
            f"DeepSpeed: {ranks} of {os.environ['WORLD_SIZE']} ranks train together, "
            f"each with the optimizer's state of {own} of {weights} weights, loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
