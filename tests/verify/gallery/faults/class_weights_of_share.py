"""Weighs classes by how often they are in a rank's share of the batch.

https://github.com/richardaecn/class-balanced-loss/issues/10
Cause: weighed-alike
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def balanced_loss(scores, targets):
    counts = torch.bincount(targets, minlength=2).clamp(min=1)  # fault
    if MENDED:
        counts = counts_of_all
    weights = counts.sum() / counts / 2
    losses = F.cross_entropy(scores, targets, reduction="none")
    return (weights[targets] * losses).mean()


rank, world = begin()
train_set = points(60)
counts_of_all = torch.bincount(train_set.tensors[1])
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = balanced_loss(model(inputs), targets)  # shows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
