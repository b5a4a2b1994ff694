"""Seeds each rank's DistributedSampler otherwise: they share out different orders.

https://github.com/NVlabs/LongLive/issues/71
Cause: shares-overlap
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set, seed=0 if MENDED else 1000 * rank)  # fault
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
