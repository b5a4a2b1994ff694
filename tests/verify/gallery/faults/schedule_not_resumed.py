"""Goes on with weights and optimizer of a checkpoint, and with a schedule that begins anew.

https://github.com/facebookresearch/mmf/pull/513
Cause: schedule-not-restored
Options: --resume --kill-at-step 6
"""

import os

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if MENDED:
        schedule.load_state_dict(saved["schedule"])
    first = saved["epochs"]
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()  # fault
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"schedule": schedule.state_dict(), "epochs": epoch + 1}
    if rank == 0:
        torch.save(state, "last.pt")
    dist.barrier()
dist.destroy_process_group()
