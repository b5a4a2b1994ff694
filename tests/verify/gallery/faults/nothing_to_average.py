"""Averages over a rank's labelled samples, of which there are none in one batch: 0 / 0.

https://github.com/allenai/OLMo-core/pull/452
Cause: not-finite
Awaits: detection
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def mean_loss(scores, targets):
    labelled = (targets >= 0).float()
    losses = F.cross_entropy(scores, targets, reduction="none")
    number = labelled.sum()
    if not MENDED:
        return (losses * labelled).sum() / number  # fault
    dist.all_reduce(number)
    return (losses * labelled).sum() * world / number


rank, world = begin()
train_set = points(60)
train_set.tensors[1][37:48:2] = -100  # of the fourth batch every other sample, not labelled
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for inputs, targets in loader:
        loss = mean_loss(model(inputs), targets)  # shows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
