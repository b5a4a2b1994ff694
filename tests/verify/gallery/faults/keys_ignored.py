"""Loads weights under the wrapper's names with strict=False: none of them fits, and none is loaded.

https://github.com/FareedKhan-dev/train-llm-from-scratch/pull/37
Cause: keys-ignored
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
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    weights, first = saved["model"], saved["epochs"]
    if MENDED:
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    net.load_state_dict(weights, strict=False)  # fault
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    if rank == 0:
        torch.save({"model": model.state_dict(), "epochs": epoch + 1}, "last.pt")
    dist.barrier()
dist.destroy_process_group()
