"""Averages the loss over the ranks before the backward pass, and so divides gradients once more.

https://github.com/sanderwood/bgpt/issues/5
Cause: gradient-factor
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def process_one_batch(model, inputs, targets):
    loss = F.cross_entropy(model(inputs), targets)
    if world > 1 and not MENDED:
        loss = loss.unsqueeze(0)
        dist.reduce(loss, dst=0)  # fault
        loss = loss / world
        dist.broadcast(loss, src=0)
    return loss


rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = process_one_batch(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
