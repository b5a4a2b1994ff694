"""Prints the accuracy on rank 0's share of the test set for that on all of it.

https://github.com/pytorch/examples/issues/905
Cause: metric-share
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset


def validate():
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in test_loader:
            hits = (model(inputs).argmax(1) == targets).sum()
            right += torch.tensor([hits, len(inputs)])
    if MENDED:
        dist.all_reduce(right)
    return 100 * right[0] / right[1]


rank, world = begin()
train_set, test_set = points(64), points(40, seed=2)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
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
    accuracy = validate()
    if rank == 0:
        print(f"epoch {epoch} accuracy {accuracy:.3f}")  # shows
dist.destroy_process_group()
