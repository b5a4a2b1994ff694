"""Replaces a parameter after the wrapper was made, which combines the old one's gradient.

https://github.com/pytorch/pytorch/issues/12603
Cause: late-parameter
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
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
if MENDED:
    net[2].weight = nn.Parameter(torch.zeros(2, 8))
model = DDP(net, find_unused_parameters=True)
if not MENDED:
    net[2].weight = nn.Parameter(torch.zeros(2, 8))  # fault
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
