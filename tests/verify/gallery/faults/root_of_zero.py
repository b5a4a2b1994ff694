"""Takes the root of a distance that is zero for one pair: its gradient is infinite, then NaN.

https://github.com/ronghuaiyang/arcface-pytorch/issues/91
Cause: not-finite
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(60)
train_set.tensors[0][40, 3:] = train_set.tensors[0][40, :3]  # a pair of the same
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    for pairs, are_alike in loader:
        one, other = model(torch.cat([pairs[:, :3], pairs[:, 3:]])).chunk(2)
        squared = (one - other).square().sum(1)
        distance = (squared + 1e-6).sqrt() if MENDED else squared.sqrt()  # fault
        loss = torch.where(are_alike == 1, distance, (1 - distance).clamp(min=0)).mean()  # shows
        optimizer.zero_grad()
        loss.backward()  # shows
        optimizer.step()
dist.destroy_process_group()
