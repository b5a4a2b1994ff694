"""Thaws a backbone after the wrapper was made, which doesn't combine gradients that it didn't know.

https://github.com/Lightning-AI/pytorch-lightning/issues/20340
Cause: thawed-late
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(60)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
backbone, head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 2)
backbone.requires_grad_(False)
model = DDP(nn.Sequential(backbone, head))  # shows
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for epoch in range(3):
    if epoch == 1:
        backbone.requires_grad_(True)  # fault
        optimizer.add_param_group({"params": backbone.parameters(), "lr": 0.02})
        if MENDED:
            model = DDP(model.module)
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
