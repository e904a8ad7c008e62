"""Lightning's Trainer with the strategy ``ddp``."""

import os
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """Learns a line."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.model(inputs), wanted)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> TensorDataset:
    inputs = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        # Lightning does not read these numbers from torchrun, but checks them against the number of ranks.
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data(), batch_size=16))
    if trainer.is_global_zero:
        first, last = model.losses[0], model.losses[-1]
        ranks = trainer.world_size
        print(f"Lightning: {ranks} of {os.environ['WORLD_SIZE']} ranks train together, loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
