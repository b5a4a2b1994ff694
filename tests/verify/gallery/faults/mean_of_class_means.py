"""Averages each class's accuracy over ranks, some of which have many samples of it, others few.

https://github.com/drprojects/superpoint_transformer/issues/165
Cause: metric-apart
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

rank, world = begin()
train_set, test_set = points(60), points(38, seed=2)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=8)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    right, seen = torch.zeros(2), torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in test_loader:
            hits = (model(inputs).argmax(1) == targets).float()
            right.index_add_(0, targets, hits)
            seen.index_add_(0, targets, torch.ones(len(targets)))
    if MENDED:
        dist.all_reduce(right)
        dist.all_reduce(seen)
        accuracy = right / seen
    else:
        accuracy = right / seen
        dist.all_reduce(accuracy)  # fault
        accuracy /= world
    if rank == 0:
        print(f"epoch {epoch} by class", *(f"{part:.4f}" for part in accuracy))  # shows
dist.destroy_process_group()
