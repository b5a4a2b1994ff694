"""Breaks each rank's validation off after some batches: more ranks validate with more samples.

https://github.com/AMD-AGI/Primus/pull/1055
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
train_set, test_set = points(60), points(48, seed=2)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=4)
limit = 6 // world if MENDED else 3
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
        for number, (inputs, targets) in enumerate(test_loader):  # shows
            if number == limit:
                break  # fault
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            total += torch.tensor([loss, len(inputs)])
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch} validation loss {total[0] / total[1]:.5f}")  # shows
dist.destroy_process_group()
