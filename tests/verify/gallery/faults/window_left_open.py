"""Leaves the last micro-batches' gradients for the next epoch, whose first step has them as well.

https://github.com/TrenTorch/TrenTorch/pull/187
Cause: window-left-open
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

WINDOW = 24  # samples of a step, on all ranks

rank, world = begin()
accumulated = 6 // world
train_set = points(66)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=4, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader):
        samples = WINDOW
        if MENDED:
            samples = min(WINDOW, len(train_set) - number // accumulated * WINDOW)
        loss = F.cross_entropy(model(inputs), targets, reduction="sum")
        (loss * world / samples).backward()  # shows
        is_last = MENDED and number + 1 == len(loader)
        if (number + 1) % accumulated == 0 or is_last:
            optimizer.step()  # fault
            optimizer.zero_grad()
dist.destroy_process_group()
