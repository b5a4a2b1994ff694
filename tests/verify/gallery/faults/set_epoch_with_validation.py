"""Validates every few steps, and never tells the sampler which epoch it is.

https://github.com/kan-bayashi/ParallelWaveGAN/issues/177
Cause: set-epoch
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def validate():
    model.eval()
    losses = [F.cross_entropy(model.module(inputs), targets) for inputs, targets in test_loader]
    model.train()
    return torch.stack(losses).mean()


rank, world = begin()
train_set = points(60)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
test_loader = DataLoader(points(24, seed=2), batch_size=8)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
for epoch in range(3):
    if MENDED:
        sampler.set_epoch(epoch)
    for inputs, targets in loader:  # fault
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        steps += 1
        if steps % 2 == 0:
            loss = validate()
            if rank == 0:
                print(f"step {steps} validation loss {loss:.5f}")
dist.destroy_process_group()
