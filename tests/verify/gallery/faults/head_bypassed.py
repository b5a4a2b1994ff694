"""Wraps two modules, and calls a method of the second one's inner module.

https://github.com/moojink/openvla-oft/issues/160
Cause: wrapper-bypassed
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, hidden):
        return self.layers(hidden)


rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
backbone = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh()))
head = DDP(Head())
optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        hidden = backbone(inputs)
        if MENDED:
            predicted = head(hidden)
        else:
            predicted = head.module(hidden)  # fault
        optimizer.zero_grad()
        F.cross_entropy(predicted, targets).backward()
        optimizer.step()
dist.destroy_process_group()
