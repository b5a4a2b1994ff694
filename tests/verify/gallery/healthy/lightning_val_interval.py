"""Lightning: a Trainer that validates twice in each epoch (val_check_interval).

Needs: lightning
"""

import os

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return F.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", F.mse_loss(self.net(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    devices = int(os.environ["WORLD_SIZE"])
    L.seed_everything(17)
    x = torch.randn(96, 5)
    y = x.abs().sum(1, keepdim=True)
    train = DataLoader(TensorDataset(x[:72], y[:72]), 12 // devices, shuffle=True)
    val = DataLoader(TensorDataset(x[72:], y[72:]), 12 // devices)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=devices,
        strategy="ddp",
        val_check_interval=0.5,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Regressor(), train, val)


if __name__ == "__main__":
    main()
