"""Leaves no_sync() on for the wrong micro-batch: the first is combined, not the last.

https://github.com/modelscope/FunASR/pull/3472
Cause: no-sync
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

ACCUMULATED = 2

rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=8 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader):
        is_last = (number + 1) % ACCUMULATED == 0
        if MENDED:
            context = nullcontext() if is_last else model.no_sync()
        else:
            context = model.no_sync() if number % ACCUMULATED else nullcontext()  # fault
        with context:
            loss = F.cross_entropy(model(inputs), targets) / ACCUMULATED
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
