"""Multiplies a mean loss by the number of ranks, as if their gradients were added up.

https://github.com/neuralmagic/sparseml/pull/135
Cause: gradient-factor
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        if not MENDED:
            loss *= world  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
