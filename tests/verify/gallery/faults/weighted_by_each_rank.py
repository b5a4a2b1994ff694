"""Draws a whole epoch of weighted samples on every rank, from the same seed.

https://github.com/huggingface/accelerate/issues/2865
Cause: no-sampler
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler


class Share(Sampler):
    """A rank's share of what another sampler draws, alike on all ranks."""

    def __init__(self, drawn):
        self.drawn = drawn

    def __iter__(self):
        return iter(list(self.drawn)[rank::world])

    def __len__(self):
        return len(self.drawn) // world


rank, world = begin()
train_set = points(60)
weights = torch.where(train_set.tensors[1] == 1, 3.0, 1.0)
generator = torch.Generator().manual_seed(5)
sampler = WeightedRandomSampler(weights, 60, generator=generator)
if MENDED:
    sampler = Share(sampler)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)  # fault
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
