"""Loads a distributed checkpoint into a new optimizer's state, which has no place for the moments.

https://github.com/KempnerInstitute/KempnerForge/pull/115
Cause: optimizer-not-restored
Options: --resume
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import MENDED, begin, points
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def states():
    if MENDED:
        return get_state_dict(model, optimizer)
    return model.module.state_dict(), optimizer.state_dict()


rank, world = begin()
train_set = points(60)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)  # shows
first = 0
while os.path.exists(f"saved/{first}/.metadata"):
    first += 1
if first:
    weights, moments = states()
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"saved/{first - 1}")
    if MENDED:
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    else:
        optimizer.load_state_dict(moments)  # fault
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    weights, moments = states()
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"saved/{epoch}")
dist.destroy_process_group()
