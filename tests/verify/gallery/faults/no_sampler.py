"""Has each rank shuffle and train on the whole data set.

https://github.com/PatrickHua/SimSiam/issues/16
Cause: no-sampler
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
sampler = DistributedSampler(train_set)
if MENDED:
    loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
else:
    loader = DataLoader(train_set, batch_size=16 // world, shuffle=True)  # fault
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
