"""Lowers each rank's learning rate by its own loss: the rates drift apart, and so do the weights.

https://github.com/lucidrains/DALLE-pytorch/issues/268
Cause: rate-apart
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=10)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        shown = loss.detach()
        if MENDED:
            dist.all_reduce(shown)
            shown /= world
        schedule.step(shown)  # fault
dist.destroy_process_group()
