"""Divides by the samples of all ranks, and leaves fully_shard's mean over replicas on as well.

https://github.com/pytorch/torchtitan/issues/2318
Cause: gradient-factor
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        number = torch.tensor(len(targets))
        dist.all_reduce(number)
        loss = F.cross_entropy(model(inputs), targets, reduction="sum") / number  # fault
        if MENDED:
            loss = loss * world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
