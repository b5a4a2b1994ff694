"""Adds a matrix up over the ranks by an all_reduce that autograd doesn't see.

https://github.com/lightly-ai/lightly/issues/1977
Cause: gradient-factor
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def decorrelation(one, other):
    """The cross-correlation over the batches of all ranks, and how far it is from the identity."""
    matrix = one.T @ other / len(one) / world
    dist.all_reduce(matrix)  # fault
    diagonal = torch.diagonal(matrix)
    loss = (diagonal - 1).square().sum() + 0.01 * (matrix.square().sum() - diagonal.square().sum())
    return loss * world if MENDED else loss


rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, _ in loader:
        one, other = model(torch.cat([inputs[:, :3], inputs[:, 3:]])).chunk(2)
        loss = decorrelation(one, other)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
