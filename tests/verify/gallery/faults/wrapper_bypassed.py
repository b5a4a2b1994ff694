"""Computes the loss on the module inside of DistributedDataParallel: each rank trains alone.

https://github.com/OpenTSLM/OpenTSLM/pull/49
Cause: wrapper-bypassed
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 2)

    def forward(self, inputs, targets):
        return self.compute_loss(inputs, targets)

    def compute_loss(self, inputs, targets):
        return F.cross_entropy(self.body(inputs), targets)


rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        if MENDED:
            loss = model(inputs, targets)
        else:
            loss = model.module.compute_loss(inputs, targets)  # fault
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
