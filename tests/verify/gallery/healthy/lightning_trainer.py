"""Lightning: a Trainer with DistributedDataParallel, validation and metrics that it combines.

Needs: lightning
"""

import os

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class LitClassifier(L.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Points(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        x = torch.randn(84, 6, generator=torch.Generator().manual_seed(2))
        y = x[:, :3].argmax(1)
        self.train, self.val = TensorDataset(x[:60], y[:60]), TensorDataset(x[60:], y[60:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


if __name__ == "__main__":
    devices = int(os.environ["WORLD_SIZE"])
    L.seed_everything(42)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy="ddp",
        log_every_n_steps=1,
        enable_progress_bar=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(LitClassifier(), datamodule=Points(12 // devices))
