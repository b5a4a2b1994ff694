"""Gives rank 0's random state to all ranks when they go on: from then on they drop the same units.

https://github.com/radixark/miles/pull/3187
Cause: random-of-one-rank
Options: --resume
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
train_set = points(60)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
torch.manual_seed(40 + rank)
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.module.load_state_dict(saved["model"])
    first = saved["epochs"]
    torch.set_rng_state(saved["random"][rank if MENDED else 0])  # fault
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    states = [None] * world
    dist.all_gather_object(states, torch.get_rng_state())
    state = {"model": model.module.state_dict(), "epochs": epoch + 1, "random": states}
    if rank == 0:
        torch.save(state, "last.pt")
    dist.barrier()
dist.destroy_process_group()
