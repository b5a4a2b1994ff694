"""Leaves the rate as it is for one rank's batch, behind a warm-up that begins with 0.

https://github.com/facebookresearch/TimeSformer/issues/59
Cause: rate-stays
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(96)
sampler = DistributedSampler(train_set)
batch_size = 12 // world if MENDED else 12
loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)  # shows
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # fault
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 4, 1))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
dist.destroy_process_group()
