"""Prepares a file on all ranks, before they have met: they write it at the same time.

https://github.com/yiqiao-yin/deepspeed-course/pull/16
Cause: file-race
"""

import os

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def prepared(file):
    samples = points(60)
    if not MENDED or int(os.environ["LOCAL_RANK"]) == 0:
        torch.save(samples.tensors, file)  # fault
    return samples


train_set = prepared("points.pt")
rank, world = begin()
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
