"""Averages a figure over ranks, one of which has no valid sample: nan, on two ranks.

https://github.com/modelscope/ms-swift/pull/10088
Cause: figure-differs
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

rank, world = begin()
train_set, test_set = points(60), points(36, seed=2)
test_set.tensors[1][1::2] = -100  # every other one without a label
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=6)
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
    total = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in test_loader:
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            total += torch.stack([loss, (targets >= 0).sum()])
    if MENDED:
        dist.all_reduce(total)
        figure = total[0] / total[1]
    else:
        figure = total[0] / total[1]
        dist.all_reduce(figure)  # fault
        figure /= world
    if rank == 0:
        print(f"epoch {epoch} validation loss {figure:.5f}")  # shows
dist.destroy_process_group()
