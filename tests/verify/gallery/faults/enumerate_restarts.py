"""Lowers the rate by enumerate(), which counts from 0 where it goes on in the midst of an epoch.

https://github.com/meta-pytorch/data/issues/1503
Cause: enumerate-restarts
Options: --resume --kill-at-step 7
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
train_set = points(60)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
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
    rest = islice(loader, skipped, None)  # shows
    for number, (inputs, targets) in enumerate(rest, skipped if MENDED else 0):  # fault
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + epoch * len(loader) + number)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        steps += 1
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "steps": steps}, "last.pt")
        dist.barrier()
    skipped = 0
dist.destroy_process_group()
