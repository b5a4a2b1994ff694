"""Counts the samples twice that DistributedSampler repeats to make shares equal.

https://github.com/pytorch/pytorch/issues/25162
Cause: padded-evaluation
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

rank, world = begin()
train_set, test_set = points(64), points(21, seed=2)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
if MENDED:
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=8)
else:
    test_sampler = DistributedSampler(test_set, shuffle=False)  # fault
    test_loader = DataLoader(test_set, batch_size=8, sampler=test_sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in test_loader:
            right = (model(inputs).argmax(1) == targets).sum()
            counts += torch.tensor([right, len(inputs)])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {counts[0] / counts[1]:.4f}")
dist.destroy_process_group()
