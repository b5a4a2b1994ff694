"""Trains an autoencoder with BatchNorm on halves of the batch, as a Trainer's DDP has it.

https://github.com/Lightning-AI/pytorch-lightning/issues/6789
Cause: batchnorm-share
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.GroupNorm(1, 12) if MENDED else nn.BatchNorm1d(12)  # fault
        self.encoder = nn.Sequential(nn.Linear(6, 12), norm, nn.ReLU())
        self.mean, self.log_variance = nn.Linear(12, 2), nn.Linear(12, 2)
        self.decoder = nn.Linear(2, 6)

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        return nn.functional.mse_loss(self.decoder(mean), x) + divergence


rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(VAE())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, _ in loader:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
dist.destroy_process_group()
