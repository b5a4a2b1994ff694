"""Skips the batches of a first epoch's order, where it goes on in the midst of a later one.

https://github.com/huggingface/accelerate/pull/4071
Cause: order-not-restored
Options: --resume --kill-at-step 6
"""

import os
from itertools import islice

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)  # fault
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.module.load_state_dict(saved["model"])
    steps = saved["steps"]
first, skipped = divmod(steps, len(loader))
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    if skipped and not MENDED:
        sampler.set_epoch(0)  # of the loader that skips, which has counted no epoch yet
    for inputs, targets in islice(loader, skipped, None):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        steps += 1
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "steps": steps}, "last.pt")
        dist.barrier()
    skipped = 0
dist.destroy_process_group()
