"""Leaves out of the validation what doesn't fill a batch of each rank's share.

https://github.com/areal-project/AReaL/pull/1096
Cause: dropped-evaluation
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

rank, world = begin()
train_set, test_set = points(64), points(36, seed=2)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler, drop_last=True)
share = Subset(test_set, range(rank, len(test_set), world))
test_loader = DataLoader(share, batch_size=12, drop_last=not MENDED)  # fault
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
