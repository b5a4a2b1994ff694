"""Has a data set draw excerpts from a generator of its own: which, depends on what came before.

https://github.com/pyannote/pyannote-audio/issues/526
Cause: data-draws
"""

import random

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Excerpts(Dataset):
    def __init__(self, samples):
        self.samples, self.epoch = samples, 0
        self.random = random.Random(7)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        drawn = random.Random(f"{self.epoch} {index}") if MENDED else self.random
        inputs, target = self.samples[index]
        first = drawn.randrange(3)  # fault
        return inputs[first : first + 4], target


rank, world = begin()
train_set = Excerpts(points(60))
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)  # shows
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    train_set.epoch = epoch
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
