"""Has each rank split the data by itself: one trains on what another validates with.

https://github.com/Lightning-AI/pytorch-lightning/issues/7728
Cause: shares-overlap
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split

rank, world = begin()
generator = torch.Generator().manual_seed(1 if MENDED else 1 + rank)
train_set, test_set = random_split(points(80), [64, 16], generator)  # fault
sampler = DistributedSampler(train_set)
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
