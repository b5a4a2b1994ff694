"""Goes on behind an epoch's end with the next epoch, and with the loader's place in the last one.

https://github.com/verl-project/verl/issues/7401
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
train_set = points(60)
sampler = DistributedSampler(train_set)  # shows
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = skipped = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.module.load_state_dict(saved["model"])
    steps, skipped = saved["steps"], saved["batches"]
    if MENDED:
        skipped %= len(loader)
for epoch in range(steps // len(loader), 3):
    sampler.set_epoch(epoch)
    rest = islice(loader, skipped, None)  # fault
    for batches, (inputs, targets) in enumerate(rest, skipped + 1):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        steps += 1
        state = {"model": model.module.state_dict(), "steps": steps, "batches": batches}
        if rank == 0:
            torch.save(state, "last.pt")
        dist.barrier()
    skipped = 0
dist.destroy_process_group()
