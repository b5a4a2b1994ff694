"""Counts batches from where it went on: a second restart within the epoch skips too few of them.

https://github.com/KempnerInstitute/KempnerForge/issues/57
Cause: order-not-restored
Options: --resume --kill-at-step 11
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
train_set = points(96)
sampler = DistributedSampler(train_set)  # shows
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = skipped = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.module.load_state_dict(saved["model"])
    first, skipped = saved["epoch"], saved["batches"]
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    batches = skipped if MENDED else 0
    for inputs, targets in islice(loader, skipped, None):  # shows
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        batches += 1  # fault
        if rank == 0:
            state = {"model": model.module.state_dict(), "epoch": epoch, "batches": batches}
            torch.save(state, "last.pt")
        dist.barrier()
    skipped = 0
dist.destroy_process_group()
