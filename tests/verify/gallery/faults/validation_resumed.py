"""Restores how far the last validation had come, and ends the next one after a single batch.

https://github.com/Lightning-AI/pytorch-lightning/issues/19549
Cause: figure-differs
Options: --resume
"""

import os

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

rank, world = begin()
train_set, test_set = points(60), points(36, seed=2)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=4)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = validated = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.module.load_state_dict(saved["model"])
    first, validated = saved["epochs"], saved["validated"]
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    total, validated = torch.zeros(2), 0 if MENDED else validated  # fault
    with torch.no_grad():
        for inputs, targets in test_loader:
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            total += torch.tensor([loss, len(inputs)])
            validated += 1
            if validated >= len(test_loader):
                break
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: validation loss {total[0] / total[1]:.5f}")  # shows
        state = {"model": model.module.state_dict(), "epochs": epoch + 1}
        torch.save(state | {"validated": validated}, "last.pt")
    validated = 0
    dist.barrier()
dist.destroy_process_group()
